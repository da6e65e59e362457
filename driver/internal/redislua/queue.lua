-- The queue, and what all steps do that can grant.

-- Expiries, in microseconds since 1970, are above this, and places below.
local PLACES = '1000000000000'

local function waits(id) return call('ZSCORE', Q, '.' .. id) end

local function stay(id, claim)
	renew(Q, '.' .. id, now + claim * 1000)
	keep(Q)
end

local function enqueue(id, claim, request)
	local two = call('ZCARD', Q) / 3 * 2 -- of each waiter's three entries stand before all expiries
	local place = (call('ZRANGE', Q, two - 1, two - 1, 'WITHSCORES')[2] or 0) + 1
	write('ZADD', Q, place, id, place, id .. ' ' .. request, digits(now + claim * 1000), '.' .. id)
	keep(Q)
	if mark ~= MARK then
		mark = MARK
		remember(last)
	end
	tell()
end

local function leave(id)
	local place = call('ZSCORE', Q, id)
	write('ZREM', Q, '.' .. id, unpack(place and call('ZRANGEBYSCORE', Q, place, place) or {}))
end

-- Reads all keys and drops what has expired.
local function begin()
	fence()
	local dead = call('ZRANGEBYSCORE', Q, PLACES, digits(now))
	open()
	for i = 1, #dead do leave(string.sub(dead[i], 2)) end
end

-- Grants to the head of the queue while the head's own limit allows it, and tells its client, unless
-- it is the owner whose step this is.
local function serve(own)
	while true do
		local head = call('ZRANGE', Q, 0, 1)
		if not head[1] then return end
		local id, claim, limit, floor, channel, holder =
			string.match(head[2] or '', '^(%S+) (%d+) (%d+) (%d+) (%S*) (.*)$')
		if not id then error('FENCELOCK the key of a queue holds something else', 0) end
		if count() >= tonumber(limit) then return end
		mark = MARK
		local token = mint(floor)
		if call('ZCARD', Q) == 3 then mark = '' end -- it is the last one
		put(id, token, tonumber(claim), holder)
		write('ZREM', Q, head[1], head[2], '.' .. id) -- not before: if the grant fails, the place is kept
		if mark ~= MARK then remember(token) end
		if id ~= own and channel ~= '' then
			-- A hint: if it may not be sent, the waiter finds out by itself. On a Cluster each name has
			-- channels of its own, in its slot.
			local publish = 'PUBLISH'
			if string.sub(channel, 1, 1) == ':' then publish, channel = 'SPUBLISH', H .. channel end
			redis.pcall(publish, channel, token .. ' ' .. id .. ' ' .. H)
		end
	end
end
