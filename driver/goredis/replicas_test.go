package goredis_test

import (
	"errors"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelock/fencelock/driver"
	"github.com/fencelock/fencelock/driver/goredis"
	"github.com/fencelock/fencelock/internal/redisbackend"
)

func TestWaitReplicas(t *testing.T) {
	redisbackend.GoRedis.TestWaitReplicas(t)

	if _, err := goredis.New(redis.NewClient(&redis.Options{}), &goredis.Options{WaitReplicas: -1}); !errors.Is(err, driver.ErrInvalid) {
		t.Errorf("New with WaitReplicas -1: got %v, want ErrInvalid", err)
	}
}

func TestClusterWaitReplicas(t *testing.T) { redisbackend.GoRedis.TestClusterWaitReplicas(t) }
