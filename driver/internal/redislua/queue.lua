-- The queue, and what all steps do that can grant.

local function waits(id)
	return call('ZSCORE', Q, id) and call('ZSCORE', X, id)
end

local function stay(id, claim)
	renew(X, id, now + claim * 1000)
	keep(X, Q, W)
end

local function enqueue(id, claim, request)
	local place = (call('ZRANGE', Q, -1, -1, 'WITHSCORES')[2] or 0) + 1
	write('HSET', W, id, request)
	write('ZADD', Q, place, id)
	write('ZADD', X, digits(now + claim * 1000), id)
	keep(X, Q, W)
end

local function leave(id) forget({id}, W, Q, X) end

-- Reads all keys and drops what has expired.
local function begin()
	fence()
	call('ZCARD', Q)
	call('HLEN', W)
	local dead = expired(X)
	open()
	forget(dead, W, Q, X)
end

-- Grants to the head of the queue while the head's own limit allows it, and tells its client, unless
-- it is the owner whose step this is.
local function serve(own)
	while true do
		local id = call('ZRANGE', Q, 0, 0)[1]
		if not id then return end
		local claim, limit, floor, channel, holder =
			string.match(call('HGET', W, id) or '', '^(%d+) (%d+) (%d+) (%S*) (.*)$')
		if not claim or not call('ZSCORE', X, id) then
			leave(id) -- what is missing was evicted
		else
			if count() >= tonumber(limit) then return end
			local token = mint(floor)
			put(id, token, tonumber(claim), holder)
			leave(id) -- not before: if the grant fails, the place is kept
			if id ~= own and channel ~= '' then
				-- A hint: if it may not be sent, the waiter finds out by itself. On a Cluster each name has
				-- channels of its own, in its slot.
				local publish = 'PUBLISH'
				if string.sub(channel, 1, 1) == ':' then publish, channel = 'SPUBLISH', H .. channel end
				redis.pcall(publish, channel, token .. ' ' .. id .. ' ' .. H)
			end
		end
	end
end
