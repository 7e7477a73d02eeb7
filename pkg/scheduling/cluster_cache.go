package scheduling

import (
	"context"
	"time"

	"github.com/gpushare/gpushare/pkg/clustercache"
	"github.com/gpushare/gpushare/pkg/eviction"
	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/requeue"
)

// clusterCache is the part of package clustercache that a Scheduler uses.
type clusterCache interface {
	eviction.Cache
	requeue.Cache
	AddHandler(h clustercache.Handler) error
	Run(ctx context.Context) error
	AwaitReady(ctx context.Context) error
	Pending() []*clustercache.PodInfo
	PendingFor(uid gpu.PodUID) time.Duration
	WatchVersions() map[string]uint64
	RequestProblems() []*clustercache.PodInfo
	Reported() []*clustercache.PodInfo
}
