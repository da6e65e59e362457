-- Gives a lease that a majority has to a node that lacks it, or has given its owner another slot. ARGV: "token id holder", ttl,
-- slot. Answers what.
at(0)
local t, id, about = parts(ARGV[1])
local ttl, slot = tonumber(ARGV[2]), ARGV[3]
open()
local mine = find(id)
if mine == slot then return MINE end
if taken(slot) then return OTHER end
if mine then drop(mine) end
raise(tonumber(t))
put(slot, id, tonumber(t), ttl, about)
return MINE
