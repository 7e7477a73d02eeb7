package kubeadm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// Options say where things are. All are required.
type Options struct {
	// Manifest is the static pod of kube-scheduler.
	Manifest string
	// Folder is where the configuration and the static pod as it was are kept, on the manifest's file system.
	Folder string
	// Timeout is how long kube-scheduler may take to come back, Settle how long it must then stay.
	Timeout, Settle time.Duration
	// Running returns nil if a kube-scheduler that was started with --config=file (without --config where file is empty)
	// runs and is healthy, and what tells its life from others; else why not.
	Running func(ctx context.Context, file string) (life string, err error)
	// Out gets a line for each step.
	Out io.Writer
}

// ErrRolledBack says that kube-scheduler didn't come back with the new configuration, and has its old one again.
var ErrRolledBack = errors.New("rolled back")

const (
	backupName   = "kube-scheduler.yaml.before"
	configPrefix = "scheduler-config-"
)

func (o Options) backup() string { return filepath.Join(o.Folder, backupName) }

// configFile is where a configuration lies. Its name changes with its content, so that the manifest does and the kubelet
// starts kube-scheduler anew.
func (o Options) configFile(config []byte) string {
	sum := sha256.Sum256(config)
	return filepath.Join(o.Folder, fmt.Sprintf("%s%x.yaml", configPrefix, sum[:6]))
}

// isOurs says whether kube-scheduler is given a configuration that was installed here.
func (o Options) isOurs(file string) bool {
	return filepath.Dir(file) == filepath.Clean(o.Folder) && strings.HasPrefix(filepath.Base(file), configPrefix)
}

// Install gives kube-scheduler the configuration, and returns when it runs with it. Installing again what is installed
// changes nothing. If it is killed at any point, installing again or undoing puts things right.
func Install(ctx context.Context, o Options, ours []byte) error {
	if filepath.Clean(o.Folder) == filepath.Dir(o.Manifest) {
		return errors.New("the folder for the backup must not be the one that the kubelet watches: it would run the backup too")
	}
	if err := os.MkdirAll(o.Folder, 0o700); err != nil {
		return fmt.Errorf("making the folder: %w", err)
	}
	now, err := os.ReadFile(o.Manifest)
	if err != nil {
		return fmt.Errorf("reading the static pod: %w", err)
	}
	before, err := o.original(now)
	if err != nil {
		return err
	}
	config, err := o.merge(before, ours)
	if err != nil {
		return err
	}
	file := o.configFile(config)
	next, err := Edit(before, file)
	if err != nil {
		return err
	}
	// In this order: each of the files is there before something names it.
	if err := errors.Join(
		replace(o.Folder, o.backup(), before),
		replace(o.Folder, file, config),
	); err != nil {
		return err
	}
	if bytes.Equal(now, next) {
		fmt.Fprintln(o.Out, "kube-scheduler's static pod is as it should be")
	} else {
		if err := replace(o.Folder, o.Manifest, next); err != nil {
			return err
		}
		fmt.Fprintf(o.Out, "%s is changed; as it was, it is in %s\n", o.Manifest, o.backup())
	}
	fmt.Fprintln(o.Out, "waiting for kube-scheduler to come back")
	if err := o.await(ctx, file); err != nil {
		return o.rollBack(ctx, now, before, err)
	}
	o.tidy(file)
	fmt.Fprintln(o.Out, "kube-scheduler runs with", file)
	return nil
}

// original returns the static pod as it was before the first installation.
func (o Options) original(now []byte) ([]byte, error) {
	m, err := parse(now)
	if err != nil {
		return nil, err
	}
	if file, found := m.flag("--config"); !found || !o.isOurs(file) {
		return now, nil
	}
	before, err := os.ReadFile(o.backup())
	if err != nil {
		return nil, fmt.Errorf("an installed configuration is in use, but what was before is lost: %w", err)
	}
	if err := o.unchanged(now, before); err != nil {
		return nil, err
	}
	return before, nil
}

// unchanged returns an error if somebody else has edited the static pod since.
func (o Options) unchanged(now, before []byte) error {
	m, err := parse(now)
	if err != nil {
		return err
	}
	file, _ := m.flag("--config")
	written, err := Edit(before, file)
	if err != nil {
		return err
	}
	if !bytes.Equal(now, written) {
		return fmt.Errorf("%s was edited after the installation, so the file from before (%s) would undo that too: take --config and the volume %q out by hand, then install again", o.Manifest, o.backup(), volume)
	}
	return nil
}

// merge returns the configuration, with what kube-scheduler was given before.
func (o Options) merge(before, ours []byte) ([]byte, error) {
	m, err := parse(before)
	if err != nil {
		return nil, err
	}
	kubeconfig, _ := m.flag("--kubeconfig")
	inside, found := m.flag("--config")
	if !found {
		return Merge(nil, ours, kubeconfig)
	}
	path, err := m.hostPath(inside)
	if err != nil {
		return nil, err
	}
	theirs, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("reading the configuration that kube-scheduler has: %w", err)
	}
	return Merge(theirs, ours, kubeconfig)
}

// await returns when kube-scheduler has run with the configuration for the time to settle, in one life.
func (o Options) await(ctx context.Context, file string) error {
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	var life string
	var since time.Time
	last := errors.New("it doesn't stay")
	for {
		current, err := o.Running(ctx, file)
		if err != nil && ctx.Err() == nil {
			last = err // After that the answer is only that the time is up.
		}
		switch {
		case err != nil:
			life = ""
		case current != life:
			life, since = current, time.Now()
		case time.Since(since) >= o.Settle:
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("kube-scheduler isn't healthy after %v: %w", o.Timeout, last)
		case <-ticker.C:
		}
	}
}

// rollBack restores what was there before this attempt, or before the first one where that was what this attempt found.
func (o Options) rollBack(ctx context.Context, now, before []byte, cause error) error {
	ctx = context.WithoutCancel(ctx) // Also after Ctrl-C: half way is no place to stop.
	m, err := parse(now)
	if err != nil {
		return errors.Join(cause, err)
	}
	target := now
	file, _ := m.flag("--config")
	if current, err := os.ReadFile(o.Manifest); err == nil && bytes.Equal(current, now) {
		target, file = before, "" // What was installed already doesn't run either.
		if m, err := parse(before); err == nil {
			file, _ = m.flag("--config")
		}
	}
	fmt.Fprintln(o.Out, "rolling back")
	if err := replace(o.Folder, o.Manifest, target); err != nil {
		return errors.Join(cause, err)
	}
	if err := o.await(ctx, file); err != nil {
		return fmt.Errorf("%w; %w, but %w", cause, ErrRolledBack, err)
	}
	o.tidy(file)
	return fmt.Errorf("%w; %w: kube-scheduler runs as before", cause, ErrRolledBack)
}

// Undo restores the static pod as it was before the first installation, to the byte, and removes what was installed.
func Undo(ctx context.Context, o Options) error {
	now, err := os.ReadFile(o.Manifest)
	if err != nil {
		return fmt.Errorf("reading the static pod: %w", err)
	}
	before, err := o.original(now)
	if err != nil {
		return err
	}
	m, err := parse(before)
	if err != nil {
		return err
	}
	file, _ := m.flag("--config")
	if bytes.Equal(now, before) {
		fmt.Fprintln(o.Out, "kube-scheduler's static pod names no configuration of gpushare")
	} else {
		if err := replace(o.Folder, o.Manifest, before); err != nil {
			return err
		}
		fmt.Fprintln(o.Out, "waiting for kube-scheduler to come back")
		if err := o.await(ctx, file); err != nil {
			return err
		}
		fmt.Fprintln(o.Out, "kube-scheduler runs as before")
	}
	o.tidy("")
	if err := os.Remove(o.backup()); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("removing the backup: %w", err)
	}
	_ = os.Remove(o.Folder) // Unless something else lies there.
	return nil
}

// tidy removes the configurations that nothing names any more.
func (o Options) tidy(keep string) {
	files, _ := filepath.Glob(filepath.Join(o.Folder, configPrefix+"*.yaml"))
	for _, file := range files {
		if file != keep {
			_ = os.Remove(file)
		}
	}
}
