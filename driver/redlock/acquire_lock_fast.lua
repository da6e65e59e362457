-- Taking a lock that nobody holds by a first proposal, and what most first proposals meet. It runs before anything else is
-- set up: that is felt in the time of a lock. The fence lives a minute longer than need be, by which a token may be ahead.
if ARGV[1] == '' and ARGV[5] == 'first' and redis.call('EXISTS', KEYS[1]) == 0 then
	local clock = redis.call('TIME')
	local t, now = tonumber(ARGV[4]), clock[1] * 1000000 + clock[2]
	if t > (tonumber(redis.call('GET', KEYS[2]) or now - 1000000) or t) and t <= now + 60000000 then
		redis.call('SET', KEYS[2], ARGV[4], 'EX', '172860')
		redis.call('SET', KEYS[1], ARGV[4] .. ' ' .. ARGV[2] .. ' ' .. ARGV[7], 'PX', ARGV[3])
		return {1, ARGV[4], '0', ''}
	end
end
