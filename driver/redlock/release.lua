-- ARGV: run, id. Answers 1 if it held.
at(0)
open()
local mine = find(ARGV[2])
if not mine then return 0 end
drop(mine)
return 1
