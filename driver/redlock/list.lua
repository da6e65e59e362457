-- For each item, whose keys are given, answers id, milliseconds left, token and holder of each of its leases.
local answers = {}
for offset = 0, #KEYS - EACH, EACH do
	at(offset)
	open()
	answers[#answers + 1] = list()
end
return answers
