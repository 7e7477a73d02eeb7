package webui

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/gang"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/reasons"
	"github.com/gpushare/gpushare/pkg/scheduling"
)

const (
	// refreshEvery is the least time between two reads of the ledger, for all viewers together.
	refreshEvery = time.Second
	// MaxConnections has room for a hundred viewers.
	MaxConnections = 200
)

// Source provides the data of the page; *scheduling.Scheduler implements it.
type Source interface {
	// Ready returns nil once there is data to show, else the reason.
	Ready() error
	// ChangesSince returns the nodes that have changed since a revision, see ledger.Ledger.
	ChangesSince(revision uint64) ledger.Changes
	// OwnerOf returns the controller of a pod as Kind/name; "" if it has none or is unknown.
	OwnerOf(namespace, name string) string
	// Explain returns why pods are pending. It limits how often that is computed: until then it returns the same pointer.
	Explain() *scheduling.Explanation
	// Groups returns the runs of all groups, ordered by group, or an error that says why this replica doesn't know them.
	Groups() ([]gang.Report, error)
}

// Options configure a Board.
type Options struct {
	Source Source
	// Standby returns nil if this replica answers kube-scheduler, else the reason why another one does. It is nil if there
	// are no other replicas.
	Standby func() error
	// Version is shown on the page.
	Version string
	Clock   clock.WithTicker
}

// status is the state of the extender itself.
type status struct {
	Version string `json:"version"`
	// NotReady is the reason why there is no data yet.
	NotReady string `json:"notReady,omitempty"`
	// Standby is the reason why another replica answers kube-scheduler.
	Standby string `json:"standby,omitempty"`
	// NoGroups is the reason why the state of groups isn't known.
	NoGroups string `json:"noGroups,omitempty"`
	// Since is the start of the history, in Unix milliseconds.
	Since int64 `json:"since"`
}

// entry is a node or a list as last encoded, and the revision at which it changed last.
type entry struct {
	text     json.RawMessage
	revision uint64
	tally    tally // Of a node.
}

// Board reads the source and encodes what has changed, once for all viewers. A viewer asks again and again, and names the revision that it has. Its
// methods are safe for concurrent use; mu guards all fields below it.
type Board struct {
	Options
	// process precedes the revisions of this process: a viewer's next request can reach another one.
	process string

	mu sync.Mutex

	refreshed time.Time
	// revision counts the refreshes that have found a change. What is found has the next one.
	revision uint64
	changed  bool // By the current refresh.
	status   status
	// complete is the complete state of this refresh, in JSON; nil until a viewer asks for it. Many viewers ask at once after a restart.
	complete []byte

	ledgerRevision uint64
	nodes          map[string]entry
	removed        uint64 // The revision at which a node was removed last.

	explained *scheduling.Explanation // The one that is in lists.
	lists     map[string]entry        // By their names in JSON.
	history   history
}

// NewBoard returns a Board. Run updates it, and so does each request.
func NewBoard(o Options) *Board {
	now := o.Clock.Now()
	return &Board{
		Options: o, process: strconv.FormatInt(now.UnixNano(), 36), nodes: map[string]entry{}, lists: map[string]entry{},
		status: status{Version: o.Version, Since: now.UnixMilli()},
	}
}

// Run updates the board's history until ctx ends.
func (b *Board) Run(ctx context.Context) error {
	ticker := b.Clock.NewTicker(refreshEvery)
	defer ticker.Stop()
	for {
		b.tick(klog.FromContext(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-ticker.C():
		}
	}
}

// tick refreshes the board if a sample is due. A panic here must not end the extender.
func (b *Board) tick(logger klog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() {
		if cause := recover(); cause != nil {
			logger.Error(fmt.Errorf("panic: %v", cause), "Page not updated", "stack", string(debug.Stack()))
		}
	}()
	if b.history.due(b.Clock.Now()) {
		b.refresh()
	}
}

// refresh updates the board. The caller holds the lock.
func (b *Board) refresh() {
	now := b.Clock.Now()
	if now.Sub(b.refreshed) < refreshEvery {
		return
	}
	b.refreshed, b.changed, b.complete = now, false, nil
	b.updateStatus()
	if b.status.NotReady == "" {
		b.readNodes()
		b.readLists()
		if b.history.due(now) {
			s := sample{Time: now.Unix(), Pending: len(b.explained.Pending), Shares: sampleShares(b.explained.Tenants), revision: b.next()}
			for _, e := range b.nodes {
				s.tally = s.add(e.tally)
			}
			b.history.add(s)
		}
	}
	if b.changed {
		b.revision++
	}
}

// next returns the revision of a change that the current refresh has found.
func (b *Board) next() uint64 {
	b.changed = true
	return b.revision + 1
}

func (b *Board) updateStatus() {
	s := status{Version: b.status.Version, Since: b.status.Since, NoGroups: b.status.NoGroups}
	if err := b.Source.Ready(); err != nil {
		s.NotReady = err.Error()
	}
	if b.Standby != nil {
		if err := b.Standby(); err != nil {
			s.Standby = err.Error()
		}
	}
	b.setStatus(s)
}

func (b *Board) setStatus(s status) {
	if s != b.status {
		b.status = s
		b.next()
	}
}

// readNodes adds the ledger's changes.
func (b *Board) readNodes() {
	changes := b.Source.ChangesSince(b.ledgerRevision)
	b.ledgerRevision = changes.Revision
	if changes.Full {
		left := sets.New[string]()
		for _, n := range changes.Nodes {
			left.Insert(n.Name)
		}
		for name := range b.nodes {
			if !left.Has(name) {
				delete(b.nodes, name)
				b.removed = b.next()
			}
		}
	}
	for _, n := range changes.Nodes {
		if text := encode(viewNode(n, b.Source.OwnerOf)); !bytes.Equal(b.nodes[n.Name].text, text) { // Else the page doesn't show what changed.
			b.nodes[n.Name] = entry{text, b.next(), tallyNode(n)}
		}
	}
}

// readLists adds the explanation and the groups.
func (b *Board) readLists() {
	explanation := b.Source.Explain()
	if explanation == b.explained {
		return
	}
	b.explained = explanation
	groups, err := b.Source.Groups()
	s := b.status
	s.NoGroups = ""
	if err != nil {
		s.NoGroups = err.Error()
	}
	b.setStatus(s)
	for name, view := range map[string]any{
		"pending":  viewPending(explanation),
		"problems": viewProblems(explanation), // Pods that share nothing by mistake.
		"reports":  viewReports(explanation),  // Problems of bound pods.
		"stranded": viewStranded(explanation), // Nodes with free memory that is of no use.
		"tenants":  viewTenants(explanation),  // Null if fair sharing is off.
		"groups":   viewRuns(groups),
	} {
		if text := encode(view); !bytes.Equal(b.lists[name].text, text) {
			b.lists[name] = entry{text: text, revision: b.next()}
		}
	}
}

// encode returns a view in JSON. Any of them can be written.
func encode(view any) json.RawMessage {
	text, _ := json.Marshal(view)
	return text
}

// State returns the state in JSON for a viewer that has a revision: what has changed since, or everything if the revision is empty or of another process. It
// is nil if nothing has changed. The caller must not change it.
func (b *Board) State(since string) []byte {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refresh()
	var has uint64
	if process, number, found := strings.Cut(since, "."); found && process == b.process {
		has, _ = strconv.ParseUint(number, 10, 64)
	}
	switch has {
	case 0:
		if b.complete == nil {
			b.complete = encode(b.stateSince(0))
		}
		return b.complete
	case b.revision:
		return nil
	}
	return encode(b.stateSince(has))
}

// stateSince returns what has changed since a revision, or everything if it is 0. The caller holds the lock.
func (b *Board) stateSince(has uint64) map[string]any {
	complete := has == 0
	state := map[string]any{
		"revision": fmt.Sprintf("%s.%d", b.process, b.revision), "complete": complete, "time": b.refreshed.UnixMilli(), "status": b.status,
		"samples": b.history.after(has),
	}
	if complete {
		words := map[reasons.Reason]string{} // The causes of pending pods.
		for _, reason := range reasons.OfPods() {
			words[reason] = reason.Words()
		}
		state["words"], state["sampleEverySeconds"] = words, int(sampleEvery/time.Second)
	}
	var names []string
	nodes, all := []json.RawMessage{}, []string{}
	for name, node := range b.nodes {
		all = append(all, name)
		if node.revision > has {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		nodes = append(nodes, b.nodes[name].text)
	}
	state["nodes"] = nodes
	if !complete && b.removed > has {
		state["names"] = all // Of the nodes that are left.
	}
	for name, list := range b.lists {
		if list.revision > has {
			state[name] = list.text
		}
	}
	return state
}
