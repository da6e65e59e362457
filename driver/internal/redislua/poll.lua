-- For each item ARGV: id, ttl, claim.
local function step(id, ttl, claim)
	begin()
	local waiting = waits(id)
	if waiting then stay(id, claim) end
	serve(id)
	local token = find(id)
	if token then return granted(token, prolong(id, ttl), ttl) end
	return waiting and WAITING or GONE
end

local answers = {}
local items = #ARGV / 3
for i = 1, items do
	at((i - 1) * #KEYS / items)
	answers[i] = run(step, ARGV[3 * i - 2], tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i]))
end
return answers
