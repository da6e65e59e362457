-- The slots of a semaphore: a sorted set of expiries and a hash of holders.
local function at(offset)
	H, D, F, W = KEYS[offset + 1], KEYS[offset + 2], KEYS[offset + 3], KEYS[offset + 4]
end

local function forget(slots)
	for i = 1, #slots, 1000 do
		local to = math.min(i + 999, #slots)
		call('ZREM', H, unpack(slots, i, to))
		call('HDEL', D, unpack(slots, i, to))
	end
end

local slots, owners, tokens, holders
local function open()
	slots, owners, tokens, holders = {}, {}, {}, {}
	local expired = call('ZRANGEBYSCORE', H, '-inf', digits(now))
	if #expired > 0 then forget(expired) end
	local all = call('HGETALL', D)
	for i = 1, #all, 2 do
		local slot = all[i]
		tokens[slot], owners[slot], holders[slot] = parts(all[i + 1])
		if not owners[slot] then error('the key of a semaphore holds something else') end
		slots[#slots + 1] = slot
	end
end

local function find(id)
	for _, slot in ipairs(slots) do
		if owners[slot] == id then return slot, tokens[slot] end
	end
end

local function taken(slot) return owners[slot] end

local function busy(id)
	local others = {}
	for _, slot in ipairs(slots) do
		if owners[slot] and owners[slot] ~= id then others[#others + 1] = slot .. ':' .. string.sub(owners[slot], 1, 8) end
	end
	return table.concat(others, ' ')
end

-- Lets the keys live as long as the latest slot.
local function keep()
	local last = call('ZRANGE', H, -1, -1, 'WITHSCORES')[2]
	if last then
		local at = digits(math.ceil(last / 1000))
		call('PEXPIREAT', H, at)
		call('PEXPIREAT', D, at)
	end
end

local function put(slot, id, t, ttl, about)
	call('HSET', D, slot, digits(t) .. ' ' .. id .. ' ' .. about)
	call('ZADD', H, digits(now + ttl * 1000), slot)
	keep()
end

local function prolong(slot, ttl)
	local expiry = math.max(tonumber(call('ZSCORE', H, slot)), now + ttl * 1000)
	-- Redis looks at its memory at the first write of a script only, and this one takes none.
	call('PEXPIREAT', H, digits(math.ceil(expiry / 1000)))
	call('ZADD', H, digits(expiry), slot)
	keep()
	return math.floor((expiry - now) / 1000)
end

local function drop(slot)
	forget({slot})
	owners[slot] = nil
end

local function clear()
	local ids = {}
	for _, slot in ipairs(slots) do ids[#ids + 1] = owners[slot] end
	call('DEL', H, D)
	return ids
end

local function list()
	local all = {}
	for _, slot in ipairs(slots) do
		all[#all + 1] = owners[slot]
		all[#all + 1] = math.floor((call('ZSCORE', H, slot) - now) / 1000)
		all[#all + 1] = tokens[slot]
		all[#all + 1] = holders[slot]
	end
	return all
end
