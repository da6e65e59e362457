-- The holders of a semaphore are a sorted set of expiries and a hash of details.

local MARK = '' -- there are no fast steps

local function at(offset)
	H, D, F, Q = KEYS[offset + 1], KEYS[offset + 2], KEYS[offset + 3], KEYS[offset + 4]
end

local function open()
	call('HLEN', D)
	forget(expired(H), D, H)
end

local function count() return call('ZCARD', H) end

local function find(id)
	return call('ZSCORE', H, id) and string.match(call('HGET', D, id) or '', '^(%d+) ')
end

local function put(id, token, ttl, holder)
	write('HSET', D, id, token .. ' ' .. holder)
	write('ZADD', H, digits(now + ttl * 1000), id)
	keep(H, D)
end

local function tell() end

local function prolong(id, ttl)
	local expiry = math.max(tonumber(call('ZSCORE', H, id)), now + ttl * 1000)
	renew(H, id, expiry)
	keep(H, D)
	return math.floor((expiry - now) / 1000)
end

local function drop(id) forget({id}, D, H) end

local function clear() write('DEL', H, D) end

local function list()
	local all = {}
	local held = call('ZRANGE', H, 0, -1, 'WITHSCORES')
	for i = 1, #held, 2 do
		local token, holder = string.match(call('HGET', D, held[i]) or '', '^(%d+) (.*)$')
		all[#all + 1] = held[i]
		all[#all + 1] = math.floor((held[i + 1] - now) / 1000)
		all[#all + 1] = token or '0'
		all[#all + 1] = holder or ''
	end
	return all
end
