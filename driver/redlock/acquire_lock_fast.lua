-- Taking a lock that nobody holds by a first proposal, and what most first proposals meet. It runs before anything else is
-- set up, and with few words: that is felt in the time of a lock. The fence lives a minute longer than need be, by which a
-- token may be ahead.
if not ARGV[4] or ARGV[5] and not ARGV[6] then
	local call, token = redis.call, ARGV[3]
	local clock = call('TIME')
	local t, now = tonumber(token), clock[1] * 1000000 + clock[2]
	if t > (tonumber(call('GET', KEYS[2]) or now - 1000000) or t) and t <= now + 60000000
		and call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
		call('SET', KEYS[2], token, 'EX', '172860')
		return 1
	end
end
