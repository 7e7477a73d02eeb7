package dispatch

import (
	"crypto/sha256"
	"strings"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// infeasibleFor is after how long a kind that no empty node could hold is tried again. A change of a node ends that earlier, but what pods without GPU
// memory leave doesn't.
const infeasibleFor = time.Minute

// kind is shared by items that fit the same free resources: if one of them has no room, none has.
type kind struct {
	kindKey
	*family
	// obstacle is why there was no room at the latest attempt on all nodes: ObstacleNoRoom or ObstacleNeverFits; ObstacleUntried if there was none.
	obstacle reasons.Obstacle
	// retryAt is when all nodes are tried again. Until then only those on which resources are freed.
	retryAt time.Time
	// items counts the items of this kind.
	items int
	// shapeKey is queue.Profile.ShapeKey.
	shapeKey string
}

// kindKey identifies a kind. For an item of several pods, text has their amounts and memory is 0.
type kindKey struct {
	text unique.Handle[string]
	// memory is what a pod requests of each card.
	memory gpu.Memory
}

// family is shared by kinds that differ only in the amount of memory: if there is no room for one of them, there is none for the kinds
// that request more.
type family struct {
	// kinds are those of the family, by their memory.
	kinds map[gpu.Memory]*kind
	// failed is the number of the latest round in which one of the kinds had no room, and least is the smallest of their amounts then.
	failed uint64
	least  gpu.Memory
}

// hasNoRoom reports whether it is known already that the kind has no room in this round.
func (k *kind) hasNoRoom(round uint64) bool { return k.failed == round && k.memory >= k.least }

// fail records that the kind has no room in this round.
func (k *kind) fail(round uint64) {
	if k.failed != round || k.memory < k.least {
		k.failed, k.least = round, k.memory
	}
}

// isDue reports whether all nodes are to be tried.
func (k *kind) isDue(now time.Time) bool { return !now.Before(k.retryAt) }

// failEverywhere records that no node has room. fits reports whether one would have if no pod had GPU memory. The times of the next attempts are spread:
// together they would take long.
func (k *kind) failEverywhere(fits bool, now time.Time) {
	interval := queue.Retry
	k.obstacle = reasons.ObstacleNoRoom
	if !fits {
		k.obstacle, interval = reasons.ObstacleNeverFits, infeasibleFor
	}
	k.retryAt = now.Add(interval - interval/2*time.Duration(k.shapeKey[0])/256)
}

// kinds are the kinds of the items that wait, by the text of their keys.
type kinds map[unique.Handle[string]]*family

// kindOf returns the kind of an item that consists of these pods.
func (k kinds) kindOf(pods []*pod) *kind {
	key := kindKey{pods[0].RoomKey, pods[0].Demand().Memory}
	if len(pods) > 1 {
		var all strings.Builder
		for _, p := range pods {
			all.WriteString(text(p.RoomKey))
			all.WriteByte(0)
			all.WriteString(p.Demand().Memory.String())
			all.WriteByte(0)
		}
		key = kindKey{text: unique.Make(all.String())}
	}
	own := k[key.text]
	if own == nil {
		own = &family{kinds: map[gpu.Memory]*kind{}}
		k[key.text] = own
	}
	found := own.kinds[key.memory]
	if found == nil {
		sum := sha256.Sum256([]byte(text(key.text) + " " + key.memory.String())) // Of a group it can be long.
		found = &kind{kindKey: key, family: own, shapeKey: string(sum[:])}
		own.kinds[key.memory] = found
	}
	return found
}

// retry makes all kinds due.
func (k kinds) retry() {
	for _, family := range k {
		for _, kind := range family.kinds {
			kind.retryAt = time.Time{}
		}
	}
}

// drop drops a kind that has no items left.
func (k kinds) drop(one *kind) {
	delete(one.kinds, one.memory)
	if len(one.kinds) == 0 {
		delete(k, one.text)
	}
}
