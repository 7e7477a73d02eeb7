package ledger

import (
	"cmp"
	"time"
)

// Item is an item of the queue: a pod, or several pods that get their places together.
type Item struct {
	// ID identifies the item, and Label names it for users.
	ID, Label string
	// Broken, Priority and Entered are the item's rank. Broken is true for what a broken run of a group still needs: each of its bound members
	// wastes memory. Entered is when the item entered the queue: when its first pod was created, or when it last failed.
	Broken   bool
	Priority int32
	Entered  time.Time
}

// Compare is the order of the queue. It returns a negative number if the item comes before the other one.
func (i *Item) Compare(o *Item) int {
	if i.Broken != o.Broken {
		if i.Broken {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(o.Priority, i.Priority), i.Entered.Compare(o.Entered), cmp.Compare(i.ID, o.ID))
}

// Before reports whether the item comes before the other one.
func (i *Item) Before(o *Item) bool { return i.Compare(o) < 0 }
