package history_test

import (
	"fmt"
	"sync"
	"time"

	"github.com/fencelock/fencelock/conformance/history"
)

// A run of several clients is recorded, then judged. The lock here is a mutex with a counter for tokens;
// with a real one, Acquired also says until when the lease is valid.
func ExampleCheck() {
	rec := history.NewRecorder("", nil)
	var lock sync.Mutex
	var token uint64

	var clients sync.WaitGroup
	for c := range 4 {
		clients.Go(func() {
			for range 100 {
				a := rec.Start(history.Request{
					Client: fmt.Sprint("client ", c), Kind: history.Lock, Name: "orders/7", Wait: true,
				})
				lock.Lock()
				token++
				a.Acquired(history.Grant{Token: token})
				rec.Write("orders", token, time.Time{}, true) // the guarded resource admits it
				a.ReleaseCalled()
				lock.Unlock()
				a.ReleaseReturned(history.OK)
			}
		})
	}
	clients.Wait()

	h := rec.History()
	report := history.Check(h, history.Rules{MinAcquired: 400})
	fmt.Println(report.Verdict(), report.Acquired, "acquired")
	fmt.Println("model:", history.CheckModel(h, history.ModelRules{}).Verdict)
	// Output:
	// pass 400 acquired
	// model: pass
}

// Two leases of one lock are believed at once: the report shows the law and the events.
func ExampleReport_String() {
	const ms = int64(time.Millisecond)
	h := history.History{
		{T: 1 * ms, Type: history.Started, Process: "p1", Attempt: 1, Client: "red", Kind: history.Lock, Name: "a"},
		{T: 2 * ms, Type: history.Acquired, Process: "p1", Attempt: 1, Client: "red", Kind: history.Lock, Name: "a", Token: 7},
		{T: 3 * ms, Type: history.Started, Process: "p2", Attempt: 1, Client: "blue", Kind: history.Lock, Name: "a"},
		{T: 4 * ms, Type: history.Acquired, Process: "p2", Attempt: 1, Client: "blue", Kind: history.Lock, Name: "a", Token: 8},
		{T: 9 * ms, Type: history.LossTold, Process: "p1", Attempt: 1, Client: "red", Kind: history.Lock, Name: "a"},
		{T: 9 * ms, Type: history.LossTold, Process: "p2", Attempt: 1, Client: "blue", Kind: history.Lock, Name: "a"},
	}
	fmt.Println(history.Check(h, history.Rules{}))
	// Output:
	// fail: 6 events, 2 attempts, 2 acquired, 0 refused, 0 failed, 1 contended, loss told at most 0s late
	//   violations: 1 of L1
	//   L1: two leases of lock "a" believed together for 5ms
	//     0.001000s acquired lock "a" token 7 (client red, process p1, attempt 1)
	//     0.003000s acquired lock "a" token 8 (client blue, process p2, attempt 1)
	//     0.008000s loss-told lock "a" (client red, process p1, attempt 1)
	//     0.008000s loss-told lock "a" (client blue, process p2, attempt 1)
}
