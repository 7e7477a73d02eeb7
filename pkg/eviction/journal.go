package eviction

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/klog/v2"

	"github.com/gpushare/gpushare/pkg/gpu"
)

// The journal is a ConfigMap with the rounds whose evictions have begun, so that a new leader can finish them. keyHolder names the term that
// wrote it last.
const keyRounds, keyHolder = "rounds", "holder"

// maxJournal limits the size of the journal, in bytes. etcd stores objects of at most 1.5 MiB.
const maxJournal = 1 << 20

// maxConflicts limits the attempts of one write: rounds of the same process can write at the same time.
const maxConflicts = 5

// errJournalFull means that a round was not begun because the journal has no space for it.
var errJournalFull = errors.New("too many pods are being evicted")

// errOtherHolder means that another process has written the journal. If this process still leads, it reads the journal again.
var errOtherHolder = errors.New("another extender has written the record of evictions")

// recordedRound is a Round in the journal. Pods are written as NAMESPACE/NAME/UID.
type recordedRound struct {
	Cause   Cause           `json:"cause"`
	For     []recordedPlace `json:"for"`
	Victims [][]string      `json:"victims"`
}

type recordedPlace struct {
	Pod   string `json:"pod"`
	Node  string `json:"node"`
	Cards []int  `json:"cards"`
}

func recordPod(pod gpu.Pod) string { return pod.Namespace + "/" + pod.Name + "/" + string(pod.UID) }

func recordedPod(text string) (pod gpu.Pod) {
	if parts := strings.Split(text, "/"); len(parts) == 3 {
		pod.Namespace, pod.Name, pod.UID = parts[0], parts[1], gpu.PodUID(parts[2])
	}
	return pod
}

// encodeRounds returns the text of the journal.
func encodeRounds(rounds []Round) (string, error) {
	records := make([]recordedRound, len(rounds))
	for i, r := range rounds {
		out := recordedRound{Cause: r.Cause}
		for _, w := range r.For {
			out.For = append(out.For, recordedPlace{recordPod(w.Pod), w.Node, w.Cards})
		}
		for _, v := range r.Victims {
			var pods []string
			for _, pod := range v.Pods {
				pods = append(pods, recordPod(pod))
			}
			out.Victims = append(out.Victims, pods)
		}
		records[i] = out
	}
	text, err := json.Marshal(records)
	if err == nil && len(text) > maxJournal {
		err = errJournalFull
	}
	return string(text), err
}

// decodeRounds is the inverse of encodeRounds. Of a pod it returns no more than its identity.
func decodeRounds(text string) (rounds []Round, err error) {
	var records []recordedRound
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &records); err != nil {
		return nil, fmt.Errorf("reading the record of evictions: %w", err)
	}
	for _, record := range records {
		r := Round{Cause: record.Cause}
		for _, w := range record.For {
			r.For = append(r.For, Waiting{recordedPod(w.Pod), w.Node, w.Cards})
		}
		for _, pods := range record.Victims {
			v := Victim{What: "Evicted after others", Why: ", of which a former leader of the extender began the evictions"}
			for _, pod := range pods {
				v.Pods = append(v.Pods, recordedPod(pod))
			}
			if len(r.For) > 0 {
				v.For = r.For[0].Pod
				r.Victims = append(r.Victims, v)
			}
		}
		if len(r.Victims) > 0 {
			rounds = append(rounds, r)
		}
	}
	return rounds, nil
}

// readJournal returns the rounds of the journal, and begins to hold it.
func (x *Executor) readJournal(ctx context.Context) ([]Round, error) {
	object, err := x.API.ConfigMap(ctx, x.Journal.Namespace, x.Journal.Name)
	if apierrors.IsNotFound(err) {
		object, err = x.API.CreateConfigMap(ctx, x.Journal.Namespace, x.Journal.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading ConfigMap %s: %w", x.Journal, err)
	}
	x.mu.Lock()
	x.version, x.holder = object.ResourceVersion, string(uuid.NewUUID())
	x.mu.Unlock()
	rounds, err := decodeRounds(object.Data[keyRounds])
	if err != nil {
		klog.FromContext(ctx).Error(err, "Record of evictions ignored")
	}
	return rounds, nil
}

// writeJournal writes the present rounds.
func (x *Executor) writeJournal(ctx context.Context) (err error) {
	defer func() {
		if err != nil {
			x.mu.Lock()
			x.unwritten = true
			x.mu.Unlock()
			err = fmt.Errorf("writing ConfigMap %s: %w", x.Journal, err)
		}
	}()
	for range maxConflicts {
		if err := x.Leading(); err != nil {
			return err
		}
		x.mu.Lock()
		version, holder := x.version, x.holder
		text, err := encodeRounds(x.present())
		x.unwritten = false
		x.mu.Unlock()
		if err != nil {
			return err
		}
		object, err := x.API.PatchConfigMap(ctx, x.Journal.Namespace, x.Journal.Name, version, map[string]string{keyRounds: text, keyHolder: holder})
		written := err == nil
		if apierrors.IsConflict(err) {
			object, err = x.API.ConfigMap(ctx, x.Journal.Namespace, x.Journal.Name)
		}
		switch {
		case err != nil:
			x.Observer.EvictionRecordFailed()
			return err
		case object.Data[keyHolder] != holder:
			x.resign()
			return errOtherHolder
		}
		x.mu.Lock()
		x.version = object.ResourceVersion
		x.mu.Unlock()
		if written {
			return nil
		}
	}
	return errors.New("it was changed by another writer at each attempt")
}

// present returns the rounds in a stable order. The caller holds the lock.
func (x *Executor) present() (rounds []Round) {
	for _, uid := range slices.Sorted(maps.Keys(x.rounds)) {
		rounds = append(rounds, x.rounds[uid].Round)
	}
	return rounds
}
