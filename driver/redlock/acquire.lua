-- ARGV: run, id, ttl, proposal, "first", "again" or "later", slot, holder, and if it waits claim and channel. Answers what, token,
-- slot, and who has which slots besides. An owner that has a slot already keeps it and its token, unless another
-- proposal takes its place.
at(0)
local id, ttl, t, first, slot = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5] == 'first', ARGV[6]
open()
local why, last = refusal(t, ARGV[5] ~= 'later')
local mine, token = find(id)
if mine and (first or t <= tonumber(token)) then
	prolong(mine, ttl)
	return {MINE, token, mine, busy(id)}
end
local rival = taken(slot)
if rival and rival ~= id then
	if mine then drop(mine) end
	enlist(tonumber(ARGV[8] or 0), ARGV[9])
	return {OTHER, digits(stored()), slot, busy(id)}
end
if why then return {why, digits(last), slot, busy(id)} end
if mine then drop(mine) end
remember(t)
put(slot, id, t, ttl, ARGV[7])
return {MINE, digits(t), slot, busy(id)}
