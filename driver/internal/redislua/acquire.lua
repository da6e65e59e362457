-- ARGV: "id holder", ttl; and if there is more to say: floor, limit, claim (0: do not wait), channel.
at(0)
return run(function()
	local id, about = string.match(ARGV[1], '^(%S+) (.*)$')
	local ttl, floor, limit = tonumber(ARGV[2]), ARGV[3] or 0, ARGV[4] or 1
	local claim, channel = tonumber(ARGV[5] or 0), ARGV[6] or ''

	begin()
	serve(id)
	local mine = find(id)
	if mine then return granted(mine, prolong(id, ttl), ttl) end
	if waits(id) then
		stay(id, claim)
		return WAITING
	end
	if count() < tonumber(limit) and call('ZCARD', Q) == 0 then
		return take(id, ttl, floor, about)
	end
	if claim == 0 then return HELD end
	enqueue(id, claim, claim .. ' ' .. limit .. ' ' .. floor .. ' ' .. channel .. ' ' .. about)
	return WAITING
end)
