-- For each item ARGV: nothing that is read. Answers id, milliseconds left, token and holder of each
-- of its leases.
local function step()
	open()
	return list()
end

local answers = {}
local items = #ARGV
for i = 1, items do
	at((i - 1) * #KEYS / items)
	answers[i] = run(step)
end
return answers
