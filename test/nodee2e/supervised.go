package nodee2e

import (
	"context"
	"errors"
	"sync"

	"github.com/gpushare/gpushare/test/controlplane"
)

// supervised is a process that is restarted when it ends by itself, as systemd does with a kubelet.
type supervised struct {
	process *controlplane.Process

	mu      sync.Mutex
	stop    context.CancelFunc
	done    chan struct{}
	crashes []string
}

func supervise(process *controlplane.Process) *supervised { return &supervised{process: process} }

// Start starts the process and returns when it is ready.
func (s *supervised) Start(ctx context.Context) error {
	if err := s.process.Start(ctx); err != nil {
		return err
	}
	watching, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	s.mu.Lock()
	s.stop, s.done = stop, done
	s.mu.Unlock()
	go func() {
		defer close(done)
		for {
			select {
			case <-watching.Done():
				return
			case <-s.process.Exited():
			}
			if watching.Err() != nil {
				return
			}
			s.mu.Lock()
			s.crashes = append(s.crashes, s.process.Tail(60))
			s.mu.Unlock()
			if err := s.process.Start(watching); err != nil {
				return // It can't be started. The caller that waits for it reports that.
			}
		}
	}()
	return nil
}

// Kill ends the process. It is not restarted.
func (s *supervised) Kill() error {
	s.mu.Lock()
	stop, done := s.stop, s.done
	s.stop, s.done = nil, nil
	s.mu.Unlock()
	if stop == nil {
		return s.process.Kill()
	}
	stop()
	err := s.process.Kill()
	<-done
	return errors.Join(err, s.process.Kill()) // It may have been restarting.
}

// Restart kills the process and starts it again.
func (s *supervised) Restart(ctx context.Context) error {
	if err := s.Kill(); err != nil {
		return err
	}
	return s.Start(ctx)
}

// Crashes returns, for each unexpected end of the process, the end of its log.
func (s *supervised) Crashes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.crashes...)
}
