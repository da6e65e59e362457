-- For each item ARGV: id, ttl.
local function step(id, ttl)
	open()
	local token = find(id)
	return token and granted(token, prolong(id, ttl), ttl) or GONE
end

local answers = {}
local items = #ARGV / 2
for i = 1, items do
	at((i - 1) * #KEYS / items)
	answers[i] = run(step, ARGV[2 * i - 1], tonumber(ARGV[2 * i]))
end
return answers
