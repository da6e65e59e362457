-- Taking a lock that nobody holds and nobody waits for. It runs before anything else is set up, and
-- spares what it can: every redis.call and every conversion of a number is felt in the time of a lock.
--
-- The token is the clock in microseconds, as text of 16 digits, so that texts compare as numbers do.
-- If the fence is not below it, or a floor is asked for, the general step computes the token.
if not ARGV[4] and redis.call('EXISTS', KEYS[1], KEYS[3]) == 0 then
	local clock = redis.call('TIME')
	local token = string.sub('000000' .. clock[1] .. string.sub('00000' .. clock[2], -6), -16)
	local last = redis.call('SET', KEYS[2], token, 'EX', '172800', 'GET')
	if not last or last < token then
		redis.call('SET', KEYS[1], token .. ' ' .. ARGV[1], 'PX', ARGV[2])
		return token
	end
	redis.call('SET', KEYS[2], last, 'EX', '172800')
end
