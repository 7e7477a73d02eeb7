package eviction

import (
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

// The record is a ConfigMap with the groups whose evictions have begun, so that a new leader can finish them. keyHolder names the term that
// wrote it last.
const keyGroups, keyHolder = "groups", "holder"

// maxConflicts limits the attempts of one write: Evict and Tick can write at the same time.
const maxConflicts = 5

// errOtherHolder means that another process has written the record. If this process still leads, it reads the record again.
var errOtherHolder = errors.New("another extender has written the record of evictions")

// decodeGroups returns the groups of the record's text. It leaves out what isn't a group.
func decodeGroups(text string) (groups []*group, err error) {
	if text == "" {
		return nil, nil
	}
	if err := json.Unmarshal([]byte(text), &groups); err != nil {
		return nil, fmt.Errorf("reading the record of evictions: %w", err)
	}
	return slices.DeleteFunc(groups, func(g *group) bool { return g == nil || len(g.Pods) == 0 }), nil
}

// readRecord returns the groups of the record, and begins to hold it.
func (x *Executor) readRecord(ctx context.Context) ([]*group, error) {
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
	groups, err := decodeGroups(object.Data[keyGroups])
	if err != nil {
		x.Observer.EvictionRecordFailed()
		klog.FromContext(ctx).Error(err, "Record of evictions can't be read, ignored: groups that a former leader evicted in part keep their other pods",
			"configMap", x.record)
	}
	return groups, nil
}

// writeRecord writes the present groups. That another process leads, or has written, isn't counted as a failure.
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
		text, err := json.Marshal(x.present())
		x.unwritten = false
		x.mu.Unlock()
		if err != nil {
			return err
		}
		object, err := x.API.PatchConfigMap(ctx, x.record.Namespace, x.record.Name, version, map[string]string{keyGroups: string(text), keyHolder: holder})
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

// present returns the groups in a stable order. The caller holds the lock.
func (x *Executor) present() (groups []*group) {
	for _, uid := range slices.Sorted(maps.Keys(x.groups)) {
		groups = append(groups, x.groups[uid])
	}
	return groups
}
