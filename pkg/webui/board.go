package webui

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"k8s.io/klog/v2"
	"k8s.io/utils/clock"

	"github.com/gpushare/gpushare/pkg/cluster"
	"github.com/gpushare/gpushare/pkg/ledger"
	"github.com/gpushare/gpushare/pkg/waiting"
)

const (
	// refreshEvery is the least time between two looks at the ledger, however many viewers there are.
	refreshEvery = 250 * time.Millisecond
	// explainEvery is how often it is found out anew why pods wait, where the pods are the same: every change of any card
	// may be a reason.
	explainEvery = time.Second
	// deltasKept is how far a viewer may lag before it gets the whole board again.
	deltasKept = 32
	// maxViewers bounds the streams that are open at once.
	maxViewers = 100
)

// Source is what the page shows; *cluster.Cluster is one.
type Source interface {
	// Ready returns why there is nothing to show yet, or nil.
	Ready() error
	Ledger() *ledger.Ledger
	// Pending returns the pods that wait, and the revision of that list; nil where that is the known one.
	Pending(known uint64) ([]cluster.PendingPod, uint64)
	// Explain says of each of these pods why it waits.
	Explain(pods []cluster.PendingPod) []waiting.Why
}

// Options are what a Board works with.
type Options struct {
	Source Source
	// Standby returns why another replica answers kube-scheduler, or nil; it is nil itself for the only replica.
	Standby func() error
	// Version is shown on the page.
	Version string
	Clock   clock.WithTicker
}

// status is what is told of the extender itself.
type status struct {
	Version string `json:"version"`
	// Waiting is why there is nothing to show yet.
	Waiting string `json:"waiting,omitempty"`
	// Standby is why another replica answers kube-scheduler.
	Standby string `json:"standby,omitempty"`
	// Since is when this extender began to keep the history, in Unix milliseconds.
	Since int64 `json:"since"`
}

// delta is what changed. Fields that are left out did not.
type delta struct {
	// Time is in Unix milliseconds.
	Time    int64             `json:"time"`
	Nodes   []json.RawMessage `json:"nodes,omitempty"`
	Removed []string          `json:"removed,omitempty"`
	Pending json.RawMessage   `json:"pending,omitempty"`
	Sample  *sample           `json:"sample,omitempty"`
	Status  *status           `json:"status,omitempty"`
}

// whole is everything there is.
type whole struct {
	Seq         uint64            `json:"seq"`
	Time        int64             `json:"time"`
	Status      status            `json:"status"`
	Nodes       []json.RawMessage `json:"nodes"`
	Pending     json.RawMessage   `json:"pending"`
	SampleEvery int               `json:"sampleEverySeconds"`
	Samples     []sample          `json:"samples"`
}

// entry is a node as it was last written down.
type entry struct {
	text  []byte
	tally tally
}

// Board follows the source and writes down what changes, once for all viewers. Its methods may be called from many
// goroutines.
type Board struct {
	Options
	stopping context.Context
	stop     context.CancelFunc

	mu        sync.Mutex
	refreshed time.Time
	known     uint64 // The ledger's revision.
	nodes     map[string]entry
	names     []string // Of nodes, in order; nil where that has to be found out anew.
	waiting   []cluster.PendingPod
	revision  uint64          // Of waiting.
	explained time.Time       // When it was found out why they wait; zero where that isn't known.
	pending   json.RawMessage // They as JSON.
	history   history
	status    status

	seq     uint64
	deltas  []*frame // The last ones; the last of all is that of seq.
	text    []byte   // The whole board at seq, nil where nobody has asked yet.
	packed  []byte   // The same as gzip, see Packed.
	whole   *frame
	changed chan struct{} // Closed at the next delta.
	viewers int
}

// NewBoard wires a Board. It is brought up to date by Run and whenever somebody looks.
func NewBoard(o Options) *Board {
	b := &Board{
		Options: o, nodes: map[string]entry{}, pending: json.RawMessage("[]"), changed: make(chan struct{}), seq: 1,
		status: status{Version: o.Version, Since: o.Clock.Now().UnixMilli()},
	}
	b.stopping, b.stop = context.WithCancel(context.Background())
	return b
}

// Run keeps the board and its history until ctx ends. Then every stream is ended, and none is begun any more.
func (b *Board) Run(ctx context.Context) error {
	defer b.stop()
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

// tick looks where somebody watches, or where the history wants a sample. Whatever goes wrong with the page must not end
// the extender.
func (b *Board) tick(logger klog.Logger) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() {
		if cause := recover(); cause != nil {
			logger.Error(fmt.Errorf("panic: %v", cause), "The page couldn't be brought up to date", "stack", string(debug.Stack()))
		}
	}()
	if b.viewers == 0 && !b.history.due(b.Clock.Now()) {
		return
	}
	if err := b.refresh(b.viewers > 0); err != nil {
		logger.Error(err, "The page couldn't be brought up to date")
	}
}

// refresh brings the board up to date: also as to why pods wait, which is dear where many do, if somebody looks. It needs
// the lock.
func (b *Board) refresh(looks bool) error {
	now := b.Clock.Now()
	complete := !looks || !b.explained.IsZero()
	if complete && !b.refreshed.IsZero() && now.Sub(b.refreshed) < refreshEvery {
		return nil
	}
	b.refreshed = now
	d := delta{Time: now.UnixMilli()}
	if s := b.look(); s != b.status {
		b.status, d.Status = s, &s
	}
	if b.status.Waiting == "" {
		if err := b.read(&d, looks); err != nil {
			return err
		}
		if b.history.due(now) {
			s := sample{at: now, pending: len(b.waiting)}
			for _, e := range b.nodes {
				s.tally = s.add(e.tally)
			}
			b.history.add(s)
			d.Sample = &s
		}
	}
	if d.Status == nil && d.Nodes == nil && d.Removed == nil && d.Pending == nil && d.Sample == nil {
		return nil
	}
	return b.publish(d)
}

// look returns how the extender stands.
func (b *Board) look() status {
	s := status{Version: b.status.Version, Since: b.status.Since}
	if err := b.Source.Ready(); err != nil {
		s.Waiting = err.Error()
	}
	if b.Standby != nil {
		if err := b.Standby(); err != nil {
			s.Standby = err.Error()
		}
	}
	return s
}

// read takes over what the source has new, and notes it in the delta.
func (b *Board) read(d *delta, looks bool) error {
	changes := b.Source.Ledger().Since(b.known)
	b.known = changes.Revision
	if changes.Whole {
		left := make(map[string]bool, len(changes.Nodes))
		for _, n := range changes.Nodes {
			left[n.Name] = true
		}
		for name := range b.nodes {
			if !left[name] {
				delete(b.nodes, name)
				b.names = nil
				d.Removed = append(d.Removed, name)
			}
		}
	}
	for _, n := range changes.Nodes {
		text, err := json.Marshal(viewNode(n))
		if err != nil {
			return fmt.Errorf("writing node %s for the page: %w", n.Name, err)
		}
		before, there := b.nodes[n.Name]
		if there && bytes.Equal(before.text, text) {
			continue // What changed isn't shown.
		}
		if !there {
			b.names = nil
		}
		b.nodes[n.Name] = entry{text, tallyNode(n)}
		d.Nodes = append(d.Nodes, text)
	}
	return b.readPending(d, looks)
}

// readPending takes over who waits, and why if somebody looks.
func (b *Board) readPending(d *delta, looks bool) error {
	pods, revision := b.Source.Pending(b.revision)
	if revision != b.revision {
		b.waiting, b.revision, b.explained = pods, revision, time.Time{}
	}
	switch {
	case !looks:
		b.explained = time.Time{}
		return nil
	case b.explained.IsZero():
	case len(b.waiting) == 0 || b.refreshed.Sub(b.explained) < explainEvery:
		return nil
	}
	b.explained = b.refreshed
	text, err := json.Marshal(viewPending(b.waiting, b.Source.Explain(b.waiting)))
	if err != nil {
		return fmt.Errorf("writing the pending pods for the page: %w", err)
	}
	if !bytes.Equal(text, b.pending) {
		b.pending, d.Pending = text, text
	}
	return nil
}

// publish hands the delta to the viewers.
func (b *Board) publish(d delta) error {
	b.seq++
	b.text, b.packed, b.whole = nil, nil, nil
	if b.viewers == 0 {
		b.deltas = nil // The next viewer begins with the whole.
		return nil
	}
	text, err := json.Marshal(d)
	if err != nil {
		return fmt.Errorf("writing a change for the page: %w", err)
	}
	if len(b.deltas) == deltasKept {
		b.deltas = slices.Delete(b.deltas, 0, 1)
	}
	b.deltas = append(b.deltas, newFrame("delta", b.seq, text))
	close(b.changed)
	b.changed = make(chan struct{})
	return nil
}

// Whole returns everything there is, as JSON. It belongs to everybody and must not be changed.
func (b *Board) Whole() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.refresh(true); err != nil {
		return nil, err
	}
	return b.writeWhole()
}

// Packed is Whole as gzip. It is packed once for all who ask: of a large board that takes a tenth of a second.
func (b *Board) Packed() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if err := b.refresh(true); err != nil {
		return nil, err
	}
	if b.packed != nil {
		return b.packed, nil
	}
	text, err := b.writeWhole()
	if err != nil {
		return nil, err
	}
	b.packed, err = pack(text, gzip.BestSpeed)
	return b.packed, err
}

func (b *Board) writeWhole() ([]byte, error) {
	if b.text != nil {
		return b.text, nil
	}
	if b.names == nil {
		b.names = slices.Sorted(maps.Keys(b.nodes))
	}
	w := whole{
		Seq: b.seq, Time: b.refreshed.UnixMilli(), Status: b.status, Nodes: make([]json.RawMessage, len(b.names)),
		Pending: b.pending, SampleEvery: int(sampleEvery / time.Second), Samples: append([]sample{}, b.history.samples...),
	}
	for i, name := range b.names {
		w.Nodes[i] = b.nodes[name].text
	}
	text, err := json.Marshal(w)
	if err != nil {
		return nil, fmt.Errorf("writing everything for the page: %w", err)
	}
	b.text = text
	return text, nil
}

// enter lets a viewer in, unless there are too many.
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

// after returns what a viewer lacks that has seen everything up to seq: deltas, or the whole board where it has seen
// nothing or lags too far; the seq that it has then; and a channel that is closed once there is more.
func (b *Board) after(seq uint64) ([]*frame, uint64, <-chan struct{}, error) {
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
	if b.whole == nil {
		text, err := b.writeWhole()
		if err != nil {
			return nil, 0, nil, err
		}
		b.whole = newFrame("whole", b.seq, text)
	}
	return []*frame{b.whole}, b.seq, b.changed, nil
}
