package ledger

import (
	"cmp"
	"time"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// Item is an item of the queue: a pod, or several pods that get their places together.
type Item struct {
	// ID identifies the item, and Label names it for users.
	ID, Label string
	// CompletesGroup, Priority and Entered are the item's rank. CompletesGroup is true if other members of a group's run are bound already: they may
	// waste memory until this item runs. ByTurn is true if it waits for a turn of fair sharing: such items come after all others, and priorities count
	// within a tenant. Entered is when the item entered the queue: when its first pod was created, or when it last failed.
	CompletesGroup, ByTurn bool
	Priority               int32
	Entered                time.Time
}

// PodItemID returns the ID of the item that consists of this pod. It orders pods that were created in the same second by name.
func PodItemID(pod gpu.Pod) string { return "pod " + pod.String() + " " + string(pod.UID) }

// Compare is the order of the queue. It returns a negative number if the item comes before the other one.
func (i *Item) Compare(o *Item) int {
	return cmp.Or(
		gpu.TrueFirst(i.CompletesGroup, o.CompletesGroup), gpu.TrueFirst(o.ByTurn, i.ByTurn), cmp.Compare(o.Priority, i.Priority), i.Entered.Compare(o.Entered),
		cmp.Compare(i.ID, o.ID),
	)
}

// Before reports whether the item comes before the other one.
func (i *Item) Before(o *Item) bool { return i.Compare(o) < 0 }
