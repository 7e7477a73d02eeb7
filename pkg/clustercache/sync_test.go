package clustercache

import (
	"errors"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	clientfake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/gpushare/gpushare/test/await"
	"github.com/gpushare/gpushare/test/check"
	"github.com/gpushare/gpushare/test/fake"
)

// If the API server can't list the objects, Ready returns the reason, until ctx ends or the lists succeed.
func TestSyncHindrance(t *testing.T) {
	client := clientfake.NewClientset()
	client.PrependReactor("list", "*", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, errors.New("the network is down")
	})
	c := New(Options{Client: client, Clock: clocktesting.NewFakeClock(begin), CacheSynced: func(time.Duration) { t.Error("the cache is synced") }})
	if err := c.Ready(); !errors.Is(err, ErrNotSynced) {
		t.Errorf("Ready without a handler: %v, want ErrNotSynced", err)
	}
	handler := newEvents()
	check.Must(t, c.AddHandler(handler))
	stop := await.Run(t, c.Run)
	await.True(t, "the reason", func() bool {
		err := c.Ready()
		return errors.Is(err, ErrNotSynced) && strings.Contains(err.Error(), "the network is down")
	})
	stop()
	if len(handler.synced) > 0 {
		t.Error("Synced was called")
	}
}

// An API server that cannot stream the first list must not answer with a state from before the last binds.
func TestFirstListIsConsistent(t *testing.T) {
	f := start(t, fake.Node("n1", 100))
	if err := f.Ready(); err != nil {
		t.Errorf("Ready after Run: %v", err)
	}
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
