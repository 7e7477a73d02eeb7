package dispatch

import (
	"cmp"
	"crypto/sha256"
	"strings"
	"unique"

	"github.com/gpushare/gpushare/pkg/gpu"
	"github.com/gpushare/gpushare/pkg/reasons"
)

// kind is shared by units that fit the same free resources: if one of them has no room, none has.
type kind struct {
	kindKey
	*family
	// obstacle is why there was no room at the latest attempt: ObstacleNoRoom or ObstacleNeverFits. If it is ObstacleUntried, the next attempt tries
	// all nodes. Otherwise the next attempt tries only nodes on which resources were freed since.
	obstacle reasons.Obstacle
	// feasible is the result of everFits; nil if it isn't known.
	feasible *bool
	// units counts the units of this kind.
	units int
	// shapeKey is queue.Profile.ShapeKey.
	shapeKey string
}

// kindKey identifies a kind. For a unit of several pods, text has their amounts and memory is 0.
type kindKey struct {
	text unique.Handle[string]
	// memory is what a pod requests of each card.
	memory gpu.Memory
}

func (k kindKey) compare(other kindKey) int {
	return cmp.Or(strings.Compare(text(k.text), text(other.text)), cmp.Compare(k.memory, other.memory))
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

// kinds are the kinds of the units that wait, by the text of their keys.
type kinds map[unique.Handle[string]]*family

// kindOf returns the kind of a unit that consists of these pods.
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
	like := k[key.text]
	if like == nil {
		like = &family{kinds: map[gpu.Memory]*kind{}}
		k[key.text] = like
	}
	found := like.kinds[key.memory]
	if found == nil {
		sum := sha256.Sum256([]byte(text(key.text) + " " + key.memory.String())) // Of a group it can be long.
		found = &kind{kindKey: key, family: like, shapeKey: string(sum[:])}
		like.kinds[key.memory] = found
	}
	return found
}

// forgetFeasible drops the results of everFits.
func (k kinds) forgetFeasible() {
	for _, like := range k {
		for _, one := range like.kinds {
			one.feasible = nil
		}
	}
}

// drop drops a kind that has no units left.
func (k kinds) drop(one *kind) {
	delete(one.kinds, one.memory)
	if len(one.kinds) == 0 {
		delete(k, one.text)
	}
}

// tried drops the kinds that have no units left, and returns those that had no room.
func (k kinds) tried() (tried []*kind) {
	for key, like := range k {
		for memory, one := range like.kinds {
			if one.units == 0 {
				delete(like.kinds, memory)
			} else if one.obstacle != reasons.ObstacleUntried {
				tried = append(tried, one)
			}
		}
		if len(like.kinds) == 0 {
			delete(k, key)
		}
	}
	return tried
}
