-- ARGV: id. Answers 1 if it held or waited.
at(0)
return run(function()
	local id = ARGV[1]
	begin()
	local found = find(id)
	if found then
		drop(id)
	else
		found = waits(id)
		leave(id) -- even if in vain: the grant below is then not the first write
	end
	serve()
	return found and 1 or 0
end)
