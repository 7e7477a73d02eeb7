package main

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes/fake"
)

// TestArrivalsAreHeldBack checks that nothing arrives while maxWaiting pods wait, that bound pods don't count for that, and that the
// report says it.
func TestArrivalsAreHeldBack(t *testing.T) {
	l := newLoad(options{calendar: newCalendar(time.Hour), nodes: 2, cards: 2, rate: 1}, fake.NewClientset(), rand.New(rand.NewPCG(1, 1)))
	for i := range maxWaiting {
		l.members[fmt.Sprint(i)] = &member{bound: i == 0}
	}
	l.arrive(t.Context())
	created := l.totals().created
	if created == 0 || l.totals().heldBack != 0 {
		t.Fatalf("with %d waiting pods: %+v, want new pods", maxWaiting-1, l.totals())
	}
	l.arrive(t.Context())
	if got := l.totals(); got.created != created || got.heldBack != 1 {
		t.Errorf("with %d waiting pods: %+v, want no new pods and an arrival that is held back", maxWaiting-1+created, got)
	}
	r := report{counts: l.totals()}
	if text := r.text(); !strings.Contains(text, "1 arrivals were held back") {
		t.Errorf("report:\n%s\nwants to say that an arrival was held back", text)
	}
}
