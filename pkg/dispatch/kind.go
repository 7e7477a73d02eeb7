package dispatch

import (
	"crypto/sha256"
	"strings"
	"time"
	"unique"

	"github.com/gpushare/gpushare/pkg/queue"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// kind is shared by items that fit the same free resources: if one of them has no room, none has.
type kind struct {
	// key is the RoomKey of the pod, or the RoomKeys of the pods.
	key unique.Handle[string]
	// obstacle is why there was no room at the latest attempt on all nodes: ObstacleNoRoom or ObstacleNeverFits; ObstacleUntried if there was none.
	obstacle reasons.Obstacle
	// retryAt is when all nodes are tried again. Until then only those on which resources are freed.
	retryAt time.Time
	// failedIn is the number of the latest round in which there was no room, and searchedIn that of the latest one that tried all nodes without success.
	failedIn, searchedIn uint64
	// items counts the items of this kind.
	items int
	// shapeKey is queue.Profile.ShapeKey.
	shapeKey string
}

// isDue reports whether all nodes are to be tried.
func (k *kind) isDue(now time.Time) bool { return !now.Before(k.retryAt) }

// failEverywhere records that no node has room. fits reports whether one would have if no pod had GPU memory. The times of the next attempts are spread:
// together they would take long.
func (k *kind) failEverywhere(fits bool, now time.Time) {
	k.obstacle = reasons.ObstacleNoRoom
	if !fits {
		k.obstacle = reasons.ObstacleNeverFits
	}
	k.retryAt = now.Add(queue.Retry - queue.Retry/2*time.Duration(k.shapeKey[0])/256)
}

// kindOf returns the kind of an item that consists of these pods.
func (m *Manager) kindOf(pods []*pod) *kind {
	key := pods[0].RoomKey
	if len(pods) > 1 {
		var all strings.Builder
		for _, p := range pods {
			all.WriteString(text(p.RoomKey))
			all.WriteByte(0)
		}
		key = unique.Make(all.String())
	}
	found := m.kinds[key]
	if found == nil {
		sum := sha256.Sum256([]byte(text(key))) // Of a group it can be long.
		found = &kind{key: key, shapeKey: string(sum[:])}
		m.kinds[key] = found
	}
	return found
}
