-- ARGV: "id holder", ttl; and if there is more to say: "claim limit channel" (claim 0: do not wait), floor.
at(0)
return run(function()
	local id, about = string.match(ARGV[1], '^(%S+) (.*)$')
	local ttl, floor = tonumber(ARGV[2]), ARGV[4] or '0'
	local claim, limit, channel = string.match(ARGV[3] or '0 1 ', '^(%d+) (%d+) (.*)$')

	begin()
	serve(id)
	local mine = find(id)
	if mine then return granted(mine, prolong(id, ttl), ttl) end
	if waits(id) then
		stay(id, claim)
		return WAITING
	end
	if count() < tonumber(limit) and call('EXISTS', Q) == 0 then
		mark = ''
		return take(id, ttl, floor, about)
	end
	if claim == '0' then return HELD end
	enqueue(id, claim, table.concat({claim, limit, floor, channel, about}, ' '))
	return WAITING
end)
