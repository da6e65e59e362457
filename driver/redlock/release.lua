-- ARGV: id, and if no waiter is to be told the greatest token to release, empty for any. The last key is that of the waiters.
-- Answers 1 if it held.
at(0)
W = KEYS[#KEYS]
open()
local mine, token = find(ARGV[1])
local most = ARGV[2]
if not mine or most and most ~= '' and tonumber(token) > tonumber(most) then return 0 end
drop(mine)
if not most then wake() end
return 1
