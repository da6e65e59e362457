// Package worker runs a user of locks as a process of its own, so that a test can stop it (SIGSTOP) in the
// middle of a hold, let it go on when its lease is long over, or kill it, and then look at what the others
// saw. Its wall clock can be set as well. It is for the conformance suite, for authors of drivers, and for tests of applications.
//
// A worker is the test binary itself, started once more: its TestMain calls [Main] first, which returns
// at once except in a worker. [Start] starts one on the backend of a URL; the binary must import the
// driver of that URL, and the backend must be one that processes can share: not memory, unless one worker
// does the work of all, see [Work].
//
// All that a worker does is recorded in the events of package history, on the clock that the processes of
// one machine share. [Recorded] and [Load] do the same for a client inside the test's own process, so that
// one run can have both, and one history.
package worker
