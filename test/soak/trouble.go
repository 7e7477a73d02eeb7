package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/gpushare/gpushare/test/controlplane"
	"github.com/gpushare/gpushare/test/framework"
)

// trouble makes things fail, and updates programs, one after the other.
type trouble struct {
	*week
	random  *rand.Rand
	updates int
	// next are the numbers of the faults that come next, so that each kind comes as often as the others.
	next []int
	// events is what happened; mu guards it.
	mu     sync.Mutex
	events []event
}

// event is a fault or an update.
type event struct {
	what   string
	update bool
}

// run makes things fail until the week is over. It returns with everything healed.
func (t *trouble) run(ctx context.Context) error {
	fault, update := time.NewTicker(min(max(t.length/10, 10*time.Second), 150*time.Second)), time.NewTicker(max(t.hour(), 20*time.Second))
	defer fault.Stop()
	defer update.Stop()
	for {
		var err error
		select {
		case <-ctx.Done():
			return nil
		case <-fault.C:
			err = t.fail(ctx)
		case <-update.C:
			err = t.update()
		}
		if err != nil {
			return err
		}
	}
}

func (t *trouble) note(e event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.events = append(t.events, e)
}

// count returns the number of faults and updates.
func (t *trouble) count() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.events)
}

// fail makes one thing fail, and heals it.
func (t *trouble) fail(ctx context.Context) error {
	faults := []struct {
		name string
		make func(context.Context) error
	}{
		{"extender killed", func(context.Context) error { return restart(t.cluster.Replicas[0].Kill, t.cluster.Replicas[0]) }},
		{"leader frozen", t.freezeLeader},
		{"API server away", t.inject(20*time.Second, controlplane.Everything, controlplane.CutConnection)},
		{"API server slow", t.inject(20*time.Second, controlplane.Everything, controlplane.Slow(300*time.Millisecond))},
		{"answers of binds lost", t.inject(10*time.Second, t.sometimes(controlplane.Bindings), controlplane.CutAnswer)},
		{"watch behind", t.delayWatch},
		{"device plugin killed", t.killPlugin},
		{"kubelet restarted", func(ctx context.Context) error { return t.node().Kubelet.Restart(ctx) }},
		{"kube-scheduler restarted", func(ctx context.Context) error { return t.cluster.Scheduler.Restart(ctx) }},
		{"card lost", t.loseCard},
	}
	if len(t.next) == 0 {
		t.next = t.random.Perm(len(faults))
	}
	f := faults[t.next[0]]
	t.next = t.next[1:]
	t.note(event{what: f.name})
	if err := f.make(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	return nil
}

// update replaces one program after the other as a rolling update does: it gets SIGTERM.
func (t *trouble) update() error {
	programs := []*controlplane.Process{t.cluster.Replicas[0]}
	for _, node := range t.running[watchedNode+1:] {
		programs = append(programs, node.Plugin)
	}
	p := programs[t.updates%len(programs)]
	t.updates++
	t.note(event{"update of " + p.Name, true})
	return restart(func() error {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		return p.Terminate(ctx)
	}, p)
}

// restart ends a program and starts it again.
func restart(end func() error, p *controlplane.Process) error {
	if err := end(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return p.Start(ctx)
}

// lasting returns how long a fault lasts that lasts this long in a run of ten minutes or more.
func (t *trouble) lasting(d time.Duration) time.Duration {
	return min(d, max(t.length/30, 5*time.Second))
}

// node returns a node whose programs may be restarted.
func (t *trouble) node() *framework.Node { return t.running[1+t.random.IntN(len(t.running)-1)] }

func (t *trouble) freezeLeader(ctx context.Context) error {
	leader := t.cluster.Leader(ctx)
	if leader < 0 {
		return nil // A change of leaders is under way.
	}
	p := t.cluster.Replicas[leader]
	if err := p.Pause(); err != nil {
		return err
	}
	time.Sleep(t.lasting(20 * time.Second))
	return p.Resume()
}

func (t *trouble) inject(d time.Duration, match controlplane.Match, fault controlplane.Fault) func(context.Context) error {
	return func(context.Context) error {
		injection := t.cluster.Proxy.Inject(match, 0, fault)
		time.Sleep(t.lasting(d))
		injection.Lift()
		return nil
	}
}

// sometimes selects a third of the requests.
func (t *trouble) sometimes(match controlplane.Match) controlplane.Match {
	return func(r *http.Request) bool { return rand.IntN(3) == 0 && match(r) }
}

func (t *trouble) delayWatch(context.Context) error {
	t.cluster.Proxy.SetWatchDelay(3 * time.Second)
	time.Sleep(t.lasting(20 * time.Second))
	t.cluster.Proxy.SetWatchDelay(0)
	return nil
}

func (t *trouble) killPlugin(context.Context) error {
	p := t.node().Plugin
	return restart(func() error {
		err := p.Kill()
		time.Sleep(5 * time.Second)
		return err
	}, p)
}

func (t *trouble) loseCard(context.Context) error {
	node := t.node()
	cards := slices.Clone(node.Cards)
	cards[t.random.IntN(len(cards))].State = "lost"
	if err := node.Machine.SetCards(cards...); err != nil {
		return err
	}
	time.Sleep(t.lasting(20 * time.Second))
	return node.Machine.SetCards(node.Cards...)
}
