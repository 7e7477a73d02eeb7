package main

import (
	"context"
	"errors"
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

// newElector returns the elector of this replica. The elector has its own client, so that a burst of binds doesn't delay the
// renewal of the Lease.
func newElector(e election, config *rest.Config, listening net.Addr, bindDeadline time.Duration, observer leader.Observer) (*leader.Elector, error) {
	config = rest.CopyConfig(config)
	config.QPS, config.Burst = 20, 40
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("creating a client of the API server: %w", err)
	}
	identity, err := leader.NewIdentity()
	if err != nil {
		return nil, fmt.Errorf("--leader-elect: %w", err)
	}
	endpoint, err := e.endpoint(listening)
	if err != nil {
		return nil, err
	}
	elector, err := leader.New(leader.Options{
		Client: client, Namespace: e.namespace, Identity: identity,
		LeaseDuration: e.leaseDuration, RenewDeadline: e.renewDeadline, RetryPeriod: e.retryPeriod,
		BindDeadline: bindDeadline,
		Endpoint:     endpoint, Observer: observer, Clock: clock.RealClock{},
	})
	if err != nil {
		return nil, fmt.Errorf("--leader-elect: %w", err)
	}
	return elector, nil
}

// endpoint returns the endpoint that the leader publishes, or nil to publish none.
func (e election) endpoint(listening net.Addr) (*leader.Endpoint, error) {
	if e.address == "" {
		return nil, nil
	}
	tcp, ok := listening.(*net.TCPAddr)
	if !ok {
		return nil, errors.New("--advertise-address needs a TCP --listen-address")
	}
	return &leader.Endpoint{
		Namespace: e.namespace, Service: e.service, Address: e.address, Port: int32(tcp.Port),
	}, nil
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
