package history

import (
	"io"
	"testing"
	"time"
)

// many strings legal runs together until they have n events.
func many(n int, faults bool) History {
	var h History
	var end int64
	for seed := uint64(1); len(h) < n; seed++ {
		part := simulate(seed, 9, 12, faults)
		shift := end - part[0].T
		for _, e := range part {
			e.T += shift
			for _, t := range []*int64{&e.V, &e.Called, &e.Sent} {
				if *t != 0 {
					*t += shift
				}
			}
			e.Attempt += seed << 20
			e.Token += seed << 30
			if e.Type == ProcessEnded || e.Type == ProcessStopped || e.Type == ProcessContinued {
				continue // of this part only
			}
			end = max(end, e.T+int64(time.Second))
			h = append(h, e)
		}
	}
	return h
}

// one is n events of a single semaphore, all of whose permits are held at once, with a hundred limits.
func one(n int) History {
	var s script
	for i := range n / 4 {
		s.permit(float64(i), (i/(n/400)+1)*(n/400)).got(float64(i)+0.5, uint64(i+1), 0).released(1e9, 1e9+1, OK)
	}
	return s.h
}

// renewed is one lease with n extensions and readings.
func renewed(n int) History {
	var s script
	a := s.lock(0).got(0, 1, 10)
	for i := 1; i < n/2; i++ {
		t := float64(i)
		a.extended(t-0.5, t, 1, t+10).observed(t+0.1, t+0.2, Believed, 1, t+10)
	}
	a.released(float64(n/2), float64(n/2), OK)
	return s.h
}

func BenchmarkCheck(b *testing.B) {
	const events = 100_000
	for _, c := range []struct {
		name string
		h    History
	}{
		{"quiet", many(events, false)},
		{"permits-all-at-once", one(events)},
		{"one-lease-renewed", renewed(events)},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if rep := Check(c.h, Rules{}); rep.Verdict() != Pass {
					b.Fatal(rep)
				}
			}
			b.ReportMetric(float64(len(c.h)), "events")
		})
	}
}

func BenchmarkCheckModel(b *testing.B) {
	h := many(10_000, false)
	for b.Loop() {
		if rep := CheckModel(h, ModelRules{}); rep.Verdict != Pass {
			b.Fatal(rep)
		}
	}
	b.ReportMetric(float64(len(h)), "events")
}

func BenchmarkRecorder(b *testing.B) {
	for _, c := range []struct {
		name string
		w    io.Writer
	}{{"memory", nil}, {"stream", io.Discard}} {
		b.Run(c.name, func(b *testing.B) {
			rec := NewRecorder("", c.w)
			b.RunParallel(func(pb *testing.PB) {
				a := rec.Start(Request{Client: "c", Kind: Lock, Name: "a"})
				for pb.Next() {
					a.ReleaseCalled()
				}
			})
		})
	}
}
