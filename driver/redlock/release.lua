-- ARGV: run, id, the greatest token to release, or nothing for any, and "wake" to tell a waiter. Answers 1 if it held.
at(0)
open()
local mine, token = find(ARGV[2])
if not mine or ARGV[3] ~= '' and tonumber(token) > tonumber(ARGV[3]) then return 0 end
drop(mine)
if ARGV[4] == 'wake' then wake() end
return 1
