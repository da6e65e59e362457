-- Gives a lease that a majority has to a node that lacks it. ARGV: run, id, ttl, token, slot, holder. Answers what.
at(0)
local id, ttl, t, slot = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
open()
if find(id) then return MINE end
if taken(slot) then return OTHER end
raise(t)
put(slot, id, t, ttl, ARGV[6])
return MINE
