-- A lock has one slot, 0, whose holder is a string that Redis lets expire.
local function at(offset) H, F, W = KEYS[offset + 1], KEYS[offset + 2], KEYS[offset + 3] end

local token, owner, holder
local function open()
	local held = call('GET', H)
	owner = nil
	if held then
		token, owner, holder = parts(held)
		if not owner then error('the key of a lock holds something else') end
	end
end

-- Answers the slot and the token of an owner.
local function find(id)
	if id == owner then return '0', token end
end

local function taken(slot) return owner end

-- The slots of others, and who they are: the beginning of an id is enough to tell them apart.
local function busy(id)
	if owner and owner ~= id then return '0:' .. string.sub(owner, 1, 8) end
	return ''
end

local function put(slot, id, t, ttl, about)
	call('SET', H, digits(t) .. ' ' .. id .. ' ' .. about, 'PX', ttl)
end

local function prolong(slot, ttl)
	local left = math.max(call('PTTL', H), ttl)
	call('PEXPIRE', H, left)
	return left
end

local function drop(slot)
	call('DEL', H)
	owner = nil
end

local function clear()
	local ids = {owner}
	call('DEL', H)
	return ids
end

local function list()
	if not owner then return {} end
	return {owner, call('PTTL', H), token, holder}
end
