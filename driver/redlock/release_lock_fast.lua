-- Releasing a lock that nobody waits for; see the fast way to take one.
if ARGV[1] == '' and ARGV[3] == '' and redis.call('EXISTS', KEYS[3]) == 0 then
	local held = redis.call('GET', KEYS[1])
	if held and string.match(held, '^%d+ (%S+) ') == ARGV[2] then return redis.call('DEL', KEYS[1]) end
end
