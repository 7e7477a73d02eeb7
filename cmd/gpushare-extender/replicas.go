package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/extender"
	"github.com/gpushare/gpushare/pkg/leader"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

// newElector returns the elector of this replica, with a client of its own, so that a burst of binds doesn't delay a renewal.
func newElector(e election, config *rest.Config, listening net.Addr, bindDeadline time.Duration, observer leader.Observer) (*leader.Elector, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 20, 40
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client of the API server: %w", err)
	}
	o := e.options
	if o.Identity, err = leader.NewIdentity(); err != nil {
		return nil, fmt.Errorf("--leader-elect: %w", err)
	}
	if e.address != "" {
		o.Endpoint = &leader.Endpoint{
			Namespace: o.Namespace, Service: e.service, Address: e.address, Port: int32(listening.(*net.TCPAddr).Port),
		}
	}
	o.Client, o.BindDeadline, o.Observer, o.Clock = client, bindDeadline, observer, clock.RealClock{}
	elector, err := leader.New(o)
	if err != nil {
		return nil, fmt.Errorf("--leader-elect: %w", err)
	}
	return elector, nil
}

// replica is what the elector leads.
type replica struct {
	*scheduling.Scheduler
	server *extender.Server
}

// Drain waits for the admitted calls, and then for the outcome of their writes.
func (r replica) Drain(ctx context.Context) error {
	err := wait.PollUntilContextCancel(ctx, 10*time.Millisecond, true, func(context.Context) (bool, error) {
		return r.server.InFlight() == 0, nil
	})
	if err != nil {
		return fmt.Errorf("waiting for kube-scheduler's calls in flight: %w", err)
	}
	return r.Scheduler.Drain(ctx)
}
