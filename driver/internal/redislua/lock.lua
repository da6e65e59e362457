-- The holder of a lock is one string, which Redis lets expire.

local MARK = 'w'

local function at(offset) H, F, Q = KEYS[offset + 1], KEYS[offset + 2], KEYS[offset + 3] end

local owner, token, holder, marked
local function open()
	local held = call('GET', H)
	owner = nil
	if held then
		marked, token, owner, holder = string.match(held, '^(w?)(%d+) (%S+) (.*)$')
		if not owner then error('FENCELOCK the key of a lock holds something else', 0) end
	end
end

local function count() return owner and 1 or 0 end

local function find(id) return id == owner and token end

local function put(id, t, ttl, about)
	owner, token, holder, marked = id, t, about, mark
	write('SET', H, mark .. t .. ' ' .. id .. ' ' .. about, 'PX', ttl)
end

-- Tells the holder that somebody waits.
local function tell()
	if owner and marked ~= MARK then
		marked = MARK
		write('SET', H, MARK .. token .. ' ' .. owner .. ' ' .. holder, 'KEEPTTL')
	end
end

-- Writes in any case: who asks replicas afterwards whether they have followed needs a write of his own to ask about.
local function prolong(id, ttl)
	local left = math.max(call('PTTL', H), ttl)
	write('PEXPIRE', H, left)
	return left
end

local function clear()
	owner = nil
	write('DEL', H)
end

local function drop(id) clear() end

local function list()
	if not owner then return {} end
	return {owner, call('PTTL', H), token, holder}
end
