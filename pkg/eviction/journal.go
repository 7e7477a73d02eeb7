package eviction

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"

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

// recordedRound, recordedPlace, recordedVictim and recordedPod are a Round in the journal. Extenders of other versions read and write it too.
type (
	recordedRound struct {
		Cause   Cause            `json:"cause"`
		For     []recordedPlace  `json:"for"`
		Victims []recordedVictim `json:"victims"`
	}
	recordedPlace struct {
		recordedPod
		Node  string `json:"node"`
		Cards []int  `json:"cards"`
	}
	recordedVictim struct {
		Pods []recordedPod `json:"pods"`
		// For is zero if it is the first of the round, as it is if an earlier version has written the journal.
		For recordedPod `json:"for,omitzero"`
	}
	recordedPod struct {
		Namespace string     `json:"namespace"`
		Name      string     `json:"name"`
		UID       gpu.PodUID `json:"uid"`
	}
)

func recorded(pod gpu.Pod) recordedPod { return recordedPod{pod.Namespace, pod.Name, pod.UID} }

func (p recordedPod) pod() gpu.Pod { return gpu.Pod{Namespace: p.Namespace, Name: p.Name, UID: p.UID} }

// encodeRounds returns the text of the journal. Of pods it has only what identifies them.
func encodeRounds(rounds []Round) (string, error) {
	out := make([]recordedRound, len(rounds))
	for i, r := range rounds {
		out[i].Cause = r.Cause
		for _, w := range r.For {
			out[i].For = append(out[i].For, recordedPlace{recorded(w.Pod), w.Node, w.Cards})
		}
		for _, v := range r.Victims {
			var pods []recordedPod
			for _, pod := range v.Pods {
				pods = append(pods, recorded(pod))
			}
			victim := recordedVictim{Pods: pods}
			if v.For.UID != r.id() {
				victim.For = recorded(v.For)
			}
			out[i].Victims = append(out[i].Victims, victim)
		}
	}
	text, err := json.Marshal(out)
	if err == nil && len(text) > maxJournal {
		err = errJournalFull
	}
	return string(text), err
}

// decodeRounds is the inverse of encodeRounds. It leaves out what isn't a round.
func decodeRounds(text string) (rounds []Round, err error) {
	if text == "" {
		return nil, nil
	}
	var in []recordedRound
	if err := json.Unmarshal([]byte(text), &in); err != nil {
		return nil, fmt.Errorf("reading the record of evictions: %w", err)
	}
	for _, r := range in {
		if len(r.For) == 0 || len(r.Victims) == 0 {
			continue
		}
		round := Round{Cause: r.Cause}
		for _, w := range r.For {
			round.For = append(round.For, Waiting{w.pod(), w.Node, w.Cards})
		}
		for _, victim := range r.Victims {
			waits := cmp.Or(victim.For, r.For[0].recordedPod).pod()
			v := Victim{For: waits, What: "Evicted after others", Why: ", of which a former leader of the extender began the evictions"}
			for _, pod := range victim.Pods {
				v.Pods = append(v.Pods, pod.pod())
			}
			round.Victims = append(round.Victims, v)
		}
		rounds = append(rounds, round)
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
		x.Observer.EvictionRecordFailed()
		klog.FromContext(ctx).Error(err, "Record of evictions can't be read, ignored: groups that a former leader evicted in part keep their other pods",
			"configMap", x.Journal)
	}
	return rounds, nil
}

// writeJournal writes the present rounds. That another process leads, or has written, isn't counted as a failure.
func (x *Executor) writeJournal(ctx context.Context) (err error) {
	standby := false
	defer func() {
		if err != nil {
			x.mu.Lock()
			x.unwritten = true
			x.mu.Unlock()
			if !standby {
				x.Observer.EvictionRecordFailed()
			}
			err = fmt.Errorf("writing ConfigMap %s: %w", x.Journal, err)
		}
	}()
	for range maxConflicts {
		if err := x.Leading(); err != nil {
			standby = true
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
			return err
		case object.Data[keyHolder] != holder:
			x.resign()
			standby = true
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
