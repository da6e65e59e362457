-- Releasing a lock that nobody waits for; see the fast way to take one.
local held = redis.call('GET', KEYS[1])
if held and string.sub(held, 18, 44) == ARGV[1] .. ' ' and redis.call('EXISTS', KEYS[3]) == 0 then
	return redis.call('DEL', KEYS[1])
end
