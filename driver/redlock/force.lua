-- Ends all leases and answers their ids. ARGV: run.
at(0)
open()
local ids = clear()
wake()
return ids
