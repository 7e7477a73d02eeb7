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
)

// The record is a ConfigMap with the rounds whose evictions have begun, so that a new leader can finish them. keyHolder names the term that
// wrote it last.
const keyRounds, keyHolder = "rounds", "holder"

// maxRecord limits the size of the record, in bytes. etcd stores objects of at most 1.5 MiB.
const maxRecord = 1 << 20

// maxConflicts limits the attempts of one write: rounds of the same process can write at the same time.
const maxConflicts = 5

// errRecordFull means that a round was not begun because the record has no space for it.
var errRecordFull = errors.New("too many pods are being evicted")

// errOtherHolder means that another process has written the record. If this process still leads, it reads the record again.
var errOtherHolder = errors.New("another extender has written the record of evictions")

// encodeRounds returns the text of the record.
func encodeRounds(rounds []Round) (string, error) {
	text, err := json.Marshal(rounds)
	if err == nil && len(text) > maxRecord {
		err = errRecordFull
	}
	return string(text), err
}

// decodeRounds is the inverse of encodeRounds. It leaves out what isn't a round.
func decodeRounds(text string) (rounds []Round, err error) {
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &rounds); err != nil {
		return nil, fmt.Errorf("reading the record of evictions: %w", err)
	}
	rounds = slices.DeleteFunc(rounds, func(r Round) bool { return len(r.For) == 0 || len(r.Victims) == 0 })
	for _, r := range rounds {
		for i := range r.Victims {
			v := &r.Victims[i]
			v.For = cmp.Or(v.For, r.For[0].PodID) // Earlier versions don't write it.
			v.What, v.Why = "Evicted after others", ", of which a former leader of the extender began the evictions"
		}
	}
	return rounds, nil
}

// readRecord returns the rounds of the record, and begins to hold it.
func (x *Executor) readRecord(ctx context.Context) ([]Round, error) {
	object, err := x.API.ConfigMap(ctx, x.record.Namespace, x.record.Name)
	if apierrors.IsNotFound(err) {
		object, err = x.API.CreateConfigMap(ctx, x.record.Namespace, x.record.Name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading ConfigMap %s: %w", x.record, err)
	}
	x.mu.Lock()
	x.version, x.holder = object.ResourceVersion, string(uuid.NewUUID())
	x.mu.Unlock()
	rounds, err := decodeRounds(object.Data[keyRounds])
	if err != nil {
		x.Observer.EvictionRecordFailed()
		klog.FromContext(ctx).Error(err, "Record of evictions can't be read, ignored: groups that a former leader evicted in part keep their other pods",
			"configMap", x.record)
	}
	return rounds, nil
}

// writeRecord writes the present rounds. That another process leads, or has written, isn't counted as a failure.
func (x *Executor) writeRecord(ctx context.Context) (err error) {
	standby := false
	defer func() {
		if err != nil {
			x.mu.Lock()
			x.unwritten = true
			x.mu.Unlock()
			if !standby {
				x.Observer.EvictionRecordFailed()
			}
			err = fmt.Errorf("writing ConfigMap %s: %w", x.record, err)
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
		object, err := x.API.PatchConfigMap(ctx, x.record.Namespace, x.record.Name, version, map[string]string{keyRounds: text, keyHolder: holder})
		written := err == nil
		switch {
		case apierrors.IsConflict(err):
			object, err = x.API.ConfigMap(ctx, x.record.Namespace, x.record.Name)
		case apierrors.IsNotFound(err):
			object, err = x.API.CreateConfigMap(ctx, x.record.Namespace, x.record.Name)
		}
		if err != nil {
			return err
		}
		// It has no holder if a user has deleted or emptied it.
		if other := object.Data[keyHolder]; other != holder && other != "" {
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
