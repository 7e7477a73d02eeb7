package webui

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"runtime/debug"
	"slices"
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
	// deltasKept is how many changes a viewer can lag behind before it gets the complete state again.
	deltasKept = 32
	// maxViewers bounds the number of open streams.
	maxViewers = 100
	// MaxConnections has room for all viewers' streams and for what they load besides. Viewers that forward a port all come from one address.
	MaxConnections = 2 * maxViewers
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

// lists are sent whole when they have changed. Fields without a change, or not known yet, are left out.
type lists struct {
	Pending json.RawMessage `json:"pending,omitempty"`
	// Problems are the pods that share nothing by mistake.
	Problems json.RawMessage `json:"problems,omitempty"`
	// Reports are the problems of bound pods.
	Reports json.RawMessage `json:"reports,omitempty"`
	// Stranded are the nodes with free memory that is of no use.
	Stranded json.RawMessage `json:"stranded,omitempty"`
	// Tenants are null if fair sharing is off.
	Tenants json.RawMessage `json:"tenants,omitempty"`
	// Groups are the runs of all groups.
	Groups json.RawMessage `json:"groups,omitempty"`
}

// delta is a change. Fields without a change are left out.
type delta struct {
	// Time is in Unix milliseconds.
	Time    int64             `json:"time"`
	Nodes   []json.RawMessage `json:"nodes,omitempty"`
	Removed []string          `json:"removed,omitempty"`
	lists
	Sample *sample `json:"sample,omitempty"`
	Status *status `json:"status,omitempty"`
}

func (d *delta) empty() bool { return reflect.DeepEqual(*d, delta{Time: d.Time}) }

// whole is the complete state.
type whole struct {
	Seq    uint64 `json:"seq"`
	Time   int64  `json:"time"`
	Status status `json:"status"`
	// Words are the causes of pending pods in words.
	Words map[reasons.Reason]string `json:"words"`
	Nodes []json.RawMessage         `json:"nodes"`
	lists
	SampleEvery int      `json:"sampleEverySeconds"`
	Samples     []sample `json:"samples"`
}

// entry is a node as last encoded.
type entry struct {
	text  []byte
	tally tally
}

// Board reads the source and encodes changes once for all viewers. Its methods are safe for concurrent use; mu guards all
// fields below it.
type Board struct {
	Options

	mu sync.Mutex

	refreshed time.Time
	known     uint64 // The ledger's revision.
	nodes     map[string]entry
	explained *scheduling.Explanation // The one that is in lists; nil if there was no viewer.
	lists     lists
	history   history
	status    status

	seq     uint64
	deltas  [][]byte      // The events with the latest deltas, the last one for seq.
	whole   []byte        // The complete state at seq; nil until requested.
	changed chan struct{} // Closed at the next delta.
	viewers int
}

// NewBoard returns a Board. Run updates it, and so does each request.
func NewBoard(o Options) *Board {
	return &Board{
		Options: o, nodes: map[string]entry{}, changed: make(chan struct{}), seq: 1,
		status: status{Version: o.Version, Since: o.Clock.Now().UnixMilli()},
	}
}

// Run updates the board and its history until ctx ends.
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

// tick refreshes the board if there are viewers or a sample is due. A panic here must not end the extender.
func (b *Board) tick(logger klog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() {
		if cause := recover(); cause != nil {
			logger.Error(fmt.Errorf("panic: %v", cause), "Page not updated", "stack", string(debug.Stack()))
		}
	}()
	if b.viewers == 0 && !b.history.due(b.Clock.Now()) {
		return
	}
	if err := b.refresh(b.viewers > 0); err != nil {
		logger.Error(err, "Page not updated")
	}
}

// refresh updates the board. watched is true if there is a viewer: without one, only the history is needed. The caller holds
// the lock.
func (b *Board) refresh(watched bool) error {
	now := b.Clock.Now()
	if complete := !watched || b.explained != nil; complete && now.Sub(b.refreshed) < refreshEvery {
		return nil
	}
	b.refreshed = now
	d := delta{Time: now.UnixMilli()}
	if s := b.currentStatus(); s != b.status {
		b.status, d.Status = s, &s
	}
	if b.status.NotReady == "" {
		if err := b.read(&d, watched); err != nil {
			return err
		}
		if b.history.due(now) {
			explanation := b.Source.Explain()
			s := sample{Time: now.Unix(), Pending: len(explanation.Pending), Shares: sampleShares(explanation.Tenants)}
			for _, e := range b.nodes {
				s.tally = s.add(e.tally)
			}
			b.history.add(s)
			d.Sample = &s
		}
	}
	if d.empty() {
		return nil
	}
	return b.publish(d)
}

func (b *Board) currentStatus() status {
	s := status{Version: b.status.Version, Since: b.status.Since, NoGroups: b.status.NoGroups}
	if err := b.Source.Ready(); err != nil {
		s.NotReady = err.Error()
	}
	if b.Standby != nil {
		if err := b.Standby(); err != nil {
			s.Standby = err.Error()
		}
	}
	return s
}

// read adds the source's changes to the board and to the delta.
func (b *Board) read(d *delta, watched bool) error {
	changes := b.Source.ChangesSince(b.known)
	b.known = changes.Revision
	if changes.Full {
		left := sets.New[string]()
		for _, n := range changes.Nodes {
			left.Insert(n.Name)
		}
		for name := range b.nodes {
			if !left.Has(name) {
				delete(b.nodes, name)
				d.Removed = append(d.Removed, name)
			}
		}
	}
	for _, n := range changes.Nodes {
		text, err := json.Marshal(viewNode(n, b.Source.OwnerOf))
		if err != nil {
			return fmt.Errorf("encoding node %s for the page: %w", n.Name, err)
		}
		if bytes.Equal(b.nodes[n.Name].text, text) {
			continue // The page doesn't show what changed.
		}
		b.nodes[n.Name] = entry{text, tallyNode(n)}
		d.Nodes = append(d.Nodes, text)
	}
	if !watched {
		b.explained = nil
		return nil
	}
	explanation := b.Source.Explain()
	if explanation == b.explained {
		return nil
	}
	b.explained = explanation
	return b.readLists(d)
}

// readLists adds the explanation and the groups to the board and to the delta.
func (b *Board) readLists(d *delta) error {
	groups, err := b.Source.Groups()
	reason := ""
	if err != nil {
		reason = err.Error()
	}
	if reason != b.status.NoGroups {
		b.status.NoGroups = reason
		s := b.status
		d.Status = &s
	}
	for _, list := range []struct {
		what         string
		view         any
		known, delta *json.RawMessage
	}{
		{"the pending pods", viewPending(b.explained), &b.lists.Pending, &d.Pending},
		{"the pods that share nothing", viewProblems(b.explained), &b.lists.Problems, &d.Problems},
		{"the problems of bound pods", viewReports(b.explained), &b.lists.Reports, &d.Reports},
		{"the memory that is of no use", viewStranded(b.explained), &b.lists.Stranded, &d.Stranded},
		{"the tenants", viewTenants(b.explained), &b.lists.Tenants, &d.Tenants},
		{"the groups", viewRuns(groups), &b.lists.Groups, &d.Groups},
	} {
		text, err := json.Marshal(list.view)
		if err != nil {
			return fmt.Errorf("encoding %s for the page: %w", list.what, err)
		}
		if !bytes.Equal(text, *list.known) {
			*list.known, *list.delta = text, text
		}
	}
	return nil
}

// publish makes the delta available to the viewers.
func (b *Board) publish(d delta) error {
	b.seq++
	b.whole = nil
	if b.viewers == 0 {
		b.deltas = nil // The next viewer gets the complete state.
		return nil
	}
	text, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("encoding a change for the page: %w", err)
	}
	if len(b.deltas) == deltasKept {
		b.deltas = slices.Delete(b.deltas, 0, 1)
	}
	b.deltas = append(b.deltas, newEvent("delta", b.seq, text))
	close(b.changed)
	b.changed = make(chan struct{})
	return nil
}

// Whole returns the complete state as JSON. The slice is shared and must not be changed.
func (b *Board) Whole() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.refresh(true); err != nil {
		return nil, err
	}
	return b.encodeWhole()
}

// encodeWhole returns the complete state. The caller holds the lock.
func (b *Board) encodeWhole() ([]byte, error) {
	if b.whole != nil {
		return b.whole, nil
	}
	w := whole{
		Seq: b.seq, Time: b.refreshed.UnixMilli(), Status: b.status, Words: map[reasons.Reason]string{},
		Nodes: make([]json.RawMessage, 0, len(b.nodes)), lists: b.lists,
		SampleEvery: int(sampleEvery / time.Second), Samples: append([]sample{}, b.history.samples...),
	}
	for _, reason := range reasons.OfPods() {
		w.Words[reason] = reason.Words()
	}
	for _, name := range slices.Sorted(maps.Keys(b.nodes)) {
		w.Nodes = append(w.Nodes, b.nodes[name].text)
	}
	text, err := json.Marshal(w)
	if err != nil {
		return nil, fmt.Errorf("encoding the state for the page: %w", err)
	}
	b.whole = text
	return text, nil
}

// enter adds a viewer. It returns false if there are too many.
func (b *Board) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.viewers >= maxViewers {
		return false
	}
	b.viewers++
	return true
}

func (b *Board) leave() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.viewers--
}

// after returns the events that a viewer at seq needs: deltas, or the complete state if it has seen nothing or lags too
// far. It also returns the viewer's next seq, and a channel that is closed at the next change.
func (b *Board) after(seq uint64) ([][]byte, uint64, <-chan struct{}, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if seq == 0 {
		if err := b.refresh(true); err != nil {
			return nil, 0, nil, err
		}
	}
	if behind := b.seq - seq; seq > 0 && behind <= uint64(len(b.deltas)) {
		return slices.Clone(b.deltas[len(b.deltas)-int(behind):]), b.seq, b.changed, nil
	}
	whole, err := b.encodeWhole()
	if err != nil {
		return nil, 0, nil, err
	}
	return [][]byte{newEvent("whole", b.seq, whole)}, b.seq, b.changed, nil
}
