-- Releasing a lock that nobody waits for; see the fast way to take one. The id stands behind a token of 16 digits; if a w is in
-- front of that it does not.
local held = redis.call('GET', KEYS[1])
if held and string.find(held, ARGV[1] .. ' ', 18, true) == 18 then
	return redis.call('DEL', KEYS[1])
end
