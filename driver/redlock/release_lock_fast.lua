-- Releasing a lock that nobody waits for; see the fast way to take one.
if not ARGV[2] and redis.call('EXISTS', KEYS[2]) == 0 then
	local held = redis.call('GET', KEYS[1])
	if held and string.match(held, '^%d+ (%S+) ') == ARGV[1] then return redis.call('DEL', KEYS[1]) end
end
