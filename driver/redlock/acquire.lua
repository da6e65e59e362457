-- ARGV: "token id holder" with the token proposed, ttl, the token again; if it waits claim and channel, else nothing or 0 and
-- empty; and unless it is a first proposal for slot 0 "first", "again" or "later", and slot. Answers what, token, slot, and who has
-- which slots besides, or only MINE if all is as it was proposed. An owner that has a slot already keeps it and its token, unless
-- another proposal takes its place.
at(0)
local _, id, about = parts(ARGV[1])
local ttl, t, mode, slot = tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[6] or 'first', ARGV[7] or '0'
open()
local why, last = refusal(t, mode ~= 'later')
local mine, token = find(id)
if mine and (mode == 'first' or t <= tonumber(token)) then
	prolong(mine, ttl)
	return {MINE, token, mine, busy(id)}
end
local rival = taken(slot)
if rival and rival ~= id then
	if mine then drop(mine) end
	enlist(tonumber(ARGV[4] or 0), ARGV[5])
	return {OTHER, digits(stored()), slot, busy(id)}
end
if why then return {why, digits(last), slot, busy(id)} end
if mine then drop(mine) end
remember(t)
put(slot, id, t, ttl, about)
return {MINE, digits(t), slot, busy(id)}
