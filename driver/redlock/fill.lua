-- Gives a lease that a majority has to a node that lacks it, or has given its owner another slot. ARGV: run, id, ttl, token,
-- slot, holder. Answers what.
at(0)
local id, ttl, t, slot = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
open()
local mine = find(id)
if mine == slot then return MINE end
if taken(slot) then return OTHER end
if mine then drop(mine) end
raise(t)
put(slot, id, t, ttl, ARGV[6])
return MINE
