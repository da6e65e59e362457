// Package history records concurrent runs of distributed locks and judges them afterwards. It is for
// authors of backends, whose conformance suite uses it, and for anyone who wants to know from a test
// whether a lock of theirs, under their load and their faults, kept its promises. It knows nothing of a
// particular lock library: tokens are numbers, and kinds are plain words.
//
// A [Recorder] stamps what clients do; histories of several processes of one machine share a clock and
// are joined by [Merge]. [Check] judges a history against the laws below in time n log n, whatever
// faults the run met. [CheckModel] asks in addition, for a quiet run, whether there is one order of all
// operations that an ideal lock or semaphore could have produced.
//
// # Belief
//
// A holder believes from the moment its acquisition returned until the first of: Release called, loss
// told, V as last extended, the end of its process. V is the holder's own valid-until: t_sent + TTL -
// margin, with t_sent the time just before the request was sent, and margin = max(1 % of TTL, 2 ms).
//
// # Laws
//
//	L1  no two leases of one lock are believed at the same moment; intervals that touch are legal
//	L2  loss is told by V plus a tolerance; nobody believes after V; V moves only by an extension, and is
//	    never later than t_sent + TTL - margin
//	L3  nothing is acquired or extended after the lease's loss, its V, or the call of its Release
//	L4  an extension never shortens V
//	L7  no attempt, release or lease stays open at the end of the run
//	S1  a permit is granted only if, counting it, no more than its own limit are held
//	T1  an acquisition that starts after another one returned has a strictly greater token
//	T2  no two acquisitions of one name have equal tokens
//	T3  a lease keeps its token
//
// and, without numbers, "guard": the tokens a guarded resource admits never decrease; "history": the
// events make sense (no lease without an attempt, no second outcome).
//
// Each violation is certain, given the stamps: where the moment of an effect is only known to lie
// between two events, the reading that favours the lock is taken.
package history
