-- Taking a lock that nobody holds and nobody waits for. It runs before anything else is set up, and
-- spares what it can: every redis.call and every conversion of a number is felt in the time of a lock.
--
-- The token is the clock in microseconds, as text of 16 digits, so that texts compare as numbers do.
-- If the fence is not below it or marked, if anything fails, or if a floor is asked for, the lock is left free
-- for the general step.
if not ARGV[4] then
	local clock = redis.call('TIME')
	local micros = clock[2]
	if #micros < 6 then micros = string.sub('00000' .. micros, -6) end
	local token = clock[1] .. micros
	local taken = redis.pcall('SET', KEYS[1], token .. ' ' .. ARGV[1], 'NX', 'PX', ARGV[2])
	if taken and taken.ok then
		local last = redis.pcall('SET', KEYS[2], token, 'EX', '172800', 'GET')
		local known = type(last) == 'string'
		if known and #last == 16 and last < token or not last and redis.call('EXISTS', KEYS[3]) == 0 then return token end
		redis.call('DEL', KEYS[1])
		if known then redis.call('SET', KEYS[2], last, 'EX', '172800') end
	end
end
