-- ARGV: for each item id and ttl. Answers for each GONE, or the token, the milliseconds left and the slot.
local answers = {}
local items = #ARGV / 2
for i = 1, items do
	at((i - 1) * #KEYS / items)
	local ok, answer = pcall(function()
		open()
		local mine, token = find(ARGV[2 * i - 1])
		if not mine then return GONE end
		return {token, prolong(mine, tonumber(ARGV[2 * i])), mine}
	end)
	answers[i] = ok and answer or redis.error_reply('FENCELOCK ' .. tostring(type(answer) == 'table' and answer.err or answer))
end
return answers
