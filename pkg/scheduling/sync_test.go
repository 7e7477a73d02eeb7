package scheduling

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/pkg/placement"
)

func TestWhatHindersTheLedgerIsTold(t *testing.T) {
	client := fake.NewClientset()
	client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("the network is down")
	})
	fakeClock := clocktesting.NewFakeClock(time.Unix(1_000_000, 0))
	c, err := New(Options{Client: client, Observer: &counts{n: map[string]int{}}, CardPolicy: placement.Binpack, BindTimeout: time.Second, Clock: fakeClock})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()
	await(t, "a waiter", fakeClock.HasWaiters)
	if err := c.Ready(); !errors.Is(err, ErrNotReady) {
		t.Errorf("Ready before the lists: %v, want ErrNotReady", err)
	}
	await(t, "the hindrance to be told", func() bool {
		fakeClock.Step(syncPatience)
		err := c.Ready()
		return errors.Is(err, ErrNotReady) && strings.Contains(err.Error(), "listing nodes: the network is down")
	})
	cancel()
	if err := <-ended; err != nil {
		t.Errorf("Run: %v", err)
	}
}

// An API server that cannot stream the first list must not answer with a state from before the last binds.
func TestTheFirstListIsNoOldOne(t *testing.T) {
	f := start(t, patient, newNode(t, "n1", 100))
	lists := 0
	for _, action := range f.client.Actions() {
		if list, ok := action.(clienttesting.ListActionImpl); ok {
			lists++
			if version := list.ListOptions.ResourceVersion; version != "" {
				t.Errorf("%s are listed at version %q, which may be from before the last binds", list.Resource.Resource, version)
			}
		}
	}
	if lists < 3 {
		t.Errorf("%d lists, want those of pods, nodes and disruption budgets", lists)
	}
}
